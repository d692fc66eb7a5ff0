"""Nothing silent: what was said too quietly, point by point, and the tests that hold it now.

=====  ============================================================================================
point  what is held
=====  ============================================================================================
1      a model that learned nothing is not headlined as a success
2      images are part of a run's identity
3      pixels: bit depths, bands, formats, tiles, ignored files, copies
4      labels and domains are checked at the start of every run
5      defaults: from scratch, dry run, help, turns, augmentations by name, class weights
6      comparisons write the plan that was run; contradictions are refused
7      pages: rounding, colours, names, data set, size and date, mistakes, glossary, next steps
8      progress, failed runs, style transfer, cache
9      imports and memory
10     the demo
also   differences from the authors' code; deployments and held-out domains; odd folders
=====  ============================================================================================
"""

import ctypes
import re
import sys
from pathlib import Path

import pytest

from feddg.runs.facts import give_memory_back

HERE = Path(__file__).parent
HELD_BY = {
    "1": (
        "report/test_report.py::test_a_model_that_learned_nothing_is_not_headlined_as_a_success",
        "report/test_comparison_page.py::"
        "test_a_constant_model_that_wins_is_never_named_without_the_remark",
        "report/test_comparison_page.py::"
        "test_balanced_accuracy_and_the_largest_class_stand_beside_the_accuracies",
        "runs/test_findings.py::test_below_the_start_is_found",
        "runs/test_findings.py::test_a_rise_at_the_end_is_told_from_noise",
        "runs/test_findings.py::test_movement_is_held_against_the_margin",
        "runs/test_findings.py::test_wilson_is_scipys",
    ),
    "2": (
        "runs/test_same_images.py::test_a_complete_run_is_not_passed_off_as_one_on_changed_images",
        "runs/test_same_images.py::test_a_root_that_was_renamed_away",
        "runs/test_same_images.py::test_resume_does_not_carry_on_with_half_of_the_images",
        "runs/test_same_images.py::test_compare_stops_before_anything_is_run",
        "runs/test_same_images.py::"
        "test_again_starts_anew_beside_the_old_run_and_is_found_from_then_on",
        "runs/test_same_images.py::test_identity_does_not_depend_on_where_the_command_is_given",
    ),
    "3": (
        "data/test_bands.py::test_deep_tiffs_are_as_bright_as_their_sensor_saw_them",
        "data/test_bands.py::test_near_infrared_in_place_of_transparency",
        "data/test_bands.py::test_large_images_become_tiles_that_stay_together",
        "data/test_bands.py::test_percentiles_of_each_band_become_black_and_white",
        "data/test_bands.py::test_every_suffix_that_counts_as_an_image_is_decoded",
        "data/test_remarks.py::test_what_is_ignored_is_counted_by_kind",
        "data/test_remarks.py::test_copies_of_training_images_in_the_test_domain_end_the_run",
        "cli/test_images.py::test_inspect_shows_how_images_are_stored_and_what_is_odd",
    ),
    "4": (
        "data/test_remarks.py::test_classes_that_differ_in_spelling_only",
        "data/test_remarks.py::test_a_class_only_in_the_test_domain_ends_the_run",
        "data/test_remarks.py::test_a_domain_that_cannot_be_decoded_ends_the_run",
        "data/test_remarks.py::test_missing_classes_are_a_note",
        "data/test_remarks.py::test_every_run_says_it",
    ),
    "5": (
        "runs/test_from_scratch.py::test_no_weights_choose_a_small_network_that_learns",
        "runs/test_from_scratch.py::"
        "test_weights_that_cannot_be_had_lead_there_unless_they_were_asked_for",
        "runs/test_from_scratch.py::test_a_comparison_says_it_once_and_writes_it_into_its_plan",
        "runs/test_from_scratch.py::test_balanced_classes_count_alike_by_the_clients_own_numbers",
        "cli/test_commands.py::test_a_dry_run_says_where_every_setting_comes_from_and_runs_nothing",
        "cli/test_flags.py::test_defaults_are_told_from_presets",
        "data/test_augment.py::test_a_program_adds_an_augmentation_by_name",
        "data/test_augment.py::test_quarter_turns_are_turns_each_as_often_as_the_others",
    ),
    "6": (
        "cli/test_comparison.py::test_the_plan_that_is_written_is_the_plan_that_was_run",
        "comparing/test_fixing.py::test_a_fixed_plan_needs_nothing_but_its_file",
        "test_experiment.py::test_another_method_over_a_file_drops_the_files_settings_and_says_so",
        "cli/test_commands.py::test_a_mistake_is_one_line_without_a_traceback",
        "data/test_remarks.py::test_four_validation_images_pick_the_round_and_that_is_said",
    ),
    "7": (
        "report/test_report.py::test_matrix_and_bars_say_the_same_percent",
        "report/test_report.py::test_a_bar_that_ends_at_100_has_room_for_its_text",
        "report/test_report.py::test_nothing_is_cut_off_at_the_right",
        "report/test_report.py::test_a_method_looks_the_same_on_every_page",
        "report/test_report.py::test_data_set_size_and_day_are_named",
        "report/test_comparison_page.py::test_an_untitled_comparison_names_methods_data_and_domain",
        "report/test_report.py::test_classes_stand_with_their_images_recall_and_precision",
        "report/test_report.py::test_commands_of_what_to_do_next_are_ones_the_console_takes",
        "runs/test_unseen_figures.py::test_the_pictures_show_the_images_that_the_captions_name",
    ),
    "8": (
        "cli/test_progress.py::test_a_line_at_evaluated_rounds_and_after_a_long_silence",
        "cli/test_commands.py::test_without_a_terminal_a_run_prints_lines_and_none_when_quiet",
        "cli/test_commands.py::test_a_run_that_cannot_begin_leaves_no_folder",
        "cli/test_images.py::"
        "test_style_transfer_keeps_shapes_goes_into_folders_and_skips_what_is_broken",
        "cli/test_storage.py::test_it_says_where_and_how_much",
    ),
    "9": (
        "cli/test_commands.py::test_help_does_not_import_torch",
        "cli/test_commands.py::test_a_run_does_not_import_what_only_pages_and_comparisons_need",
        "cli/test_commands.py::test_training_does_not_import_a_compiler",
        "test_nothing_silent.py::test_freed_memory_is_given_back",
    ),
    "10": (
        "cli/test_commands.py::test_the_demo_compares_explains_the_best_and_ends_with_its_page",
        "cli/test_commands.py::"
        "test_the_demos_plan_holds_every_domain_out_under_the_mean_of_the_last_rounds",
        "cli/test_commands.py::test_the_demo_fills_the_cores_and_starts_no_process_for_one",
    ),
    "also": (
        *(
            f"methods/test_authors_code.py::test_{what}"
            for what in (
                "rsc_mutes_the_map_of_the_training_pass_and_rounds_the_number_of_images",
                "l2d_judges_the_augmented_embedding_by_the_originals_gaussian",
                "fpl_averages_its_contrast_over_the_whole_batch",
                "randconv_chains_its_versions",
                "csac_adds_kernels_and_layers_up_and_may_keep_its_first_model",
                "the_contents_variance_may_divide_by_one_less",
                "tent_with_several_steps_returns_the_last_ones_logits",
                "what_a_predictor_keeps_is_part_of_no_graph",
            )
        ),
        "methods/test_elcfs.py::"
        "test_the_episode_is_a_step_on_the_own_images_then_the_loss_on_the_mixed",
        "data/test_augment.py::test_hue_in_hsv_is_torchvisions_shift_and_another_than_the_rotation",
        "flower/test_inprocess_grid.py::"
        "test_a_site_that_would_train_on_what_the_run_holds_out_is_refused_by_name",
        "methods/test_authors_code.py::test_every_method_of_a_paper_says_where_it_differs",
        "comparing/test_intervals.py::test_equal_differences_decide_nothing",
        "data/test_odd_folders.py::test_what_is_said",
        "cli/test_newcomers_hour.py::test_the_hour_goes_as_the_page_says",
    ),
}


@pytest.mark.parametrize("point", HELD_BY)
def test_every_point_is_held_by_tests_that_are_there(point):
    for held in HELD_BY[point]:
        file, _, name = held.partition("::")
        assert re.search(rf"^def {name}\(", (HERE / file).read_text(), re.MULTILINE), held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own function")
def test_freed_memory_is_given_back():
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("this C library has no malloc_trim")
    pieces = [bytearray(2_000) for _ in range(20_000)]
    kept = pieces[::500]  # holes of a megabyte between them
    del pieces
    assert give_memory_back()
    assert kept
