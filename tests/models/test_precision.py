"""Which precision ``auto`` means on which hardware."""

import pytest
import torch

from feddg.models.precision import choose_precision

CPU = torch.device("cpu")


@pytest.fixture
def processor(monkeypatch):
    """Pretends a processor with some of the instructions that count."""

    def pretend(*has):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" in has)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "bf16" in has)
        facts = {"avx512_fp16": "fp16" in has}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: facts, raising=False)

    return pretend


@pytest.mark.parametrize(
    ("has", "means"),
    [
        (["amx", "bf16", "fp16"], "bfloat16"),  # Intel, Sapphire Rapids and later
        (["bf16", "fp16"], "float32"),  # the same in a virtual machine that hides AMX
        (["bf16"], "bfloat16"),  # AMD, Zen 4 and later
        ([], "float32"),
    ],
)
def test_auto_is_bfloat16_where_that_is_faster(processor, has, means):
    processor(*has)
    assert choose_precision("auto", CPU) == means
    for said in ("float32", "bfloat16"):
        assert choose_precision(said, CPU) == said


def test_a_pytorch_that_cannot_tell_takes_what_multiplies(processor, monkeypatch):
    processor("bf16", "fp16")
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert choose_precision("auto", CPU) == "bfloat16"
