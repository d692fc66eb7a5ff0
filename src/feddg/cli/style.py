"""``feddg style``: train a style codec, or re-draw images with one."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train a style codec, or re-draw images with one.",
    no_args_is_help=True,
    suggest_commands=False,
)


@app.command("train")
def style_train(
    content: Annotated[list[Path], typer.Option(help="folder(s) of photographs")],
    style: Annotated[list[Path], typer.Option(help="folder(s) of pictures in other styles")],
    out: Annotated[Path, typer.Option(help="folder for weights, loss curve and saved state")],
    steps: Annotated[int, typer.Option(help="training steps")] = 4000,
    size: Annotated[list[int], typer.Option(help="side(s) of the training crops, pixels")] = [64],  # noqa: B006
    seed: Annotated[int, typer.Option(help="seed")] = 0,
    codec: Annotated[
        str, typer.Option(help="what to train: compact, modulated or vgg19")
    ] = "compact",
    encoder: Annotated[Path | None, typer.Option(help="the encoder's first weights")] = None,
    decoder: Annotated[Path | None, typer.Option(help="the decoder's first weights")] = None,
    loss_network: Annotated[
        Path | None,
        typer.Option(help="VGG-19-like encoder that judges; with it, the encoder is trained, too"),
    ] = None,
    keep_encoder: Annotated[
        bool, typer.Option("--keep-encoder", help="train the decoder alone, whatever judges")
    ] = False,
    critic: Annotated[float, typer.Option(min=0, help="weight of an adversary; 0 for none")] = 0,
    learning_rate: Annotated[float, typer.Option(min=0, help="Adam's, at its highest")] = 1e-3,
    save_every: Annotated[int, typer.Option(min=1, help="steps between saved states")] = 250,
) -> None:
    """Train a codec on folders of content and style images; run again to go on."""
    from rich.progress import Progress

    from feddg.styles.training import Recipe, train_codec

    sizes = tuple(size)
    recipe = Recipe(
        codec,
        steps=steps,
        seed=seed,
        sizes=sizes,
        learning_rate=learning_rate,
        critic_weight=critic,
        keep_encoder=keep_encoder,
    )
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training the codec", total=steps)
        result = train_codec(
            content=content,
            style=style,
            out=out,
            recipe=recipe,
            encoder=encoder,
            start=decoder,
            loss_network=loss_network,
            progress=lambda state: progress.update(task, completed=state.step),
            save_every=save_every,
        )
    typer.echo(result)


@app.command("transfer")
def style_transfer(
    images: Annotated[Path, typer.Argument(help="an image or a folder of images to re-draw")],
    style: Annotated[Path, typer.Option(help="an image, or a folder whose pooled style to take")],
    out: Annotated[Path, typer.Option(help="folder for the re-drawn images")],
    strength: Annotated[float, typer.Option(min=0, max=1, help="adaIN blend")] = 1.0,
    size: Annotated[int, typer.Option(help="longer side of the results, pixels")] = 128,
    codec: Annotated[str, typer.Option(help="compact, modulated, vgg19 or colors")] = "compact",
    encoder: Annotated[Path | None, typer.Option(help="encoder weights")] = None,
    decoder: Annotated[Path | None, typer.Option(help="decoder weights")] = None,
) -> None:
    """Re-draw images in the style of another image, or of a folder of images."""
    from feddg.styles.transfer import redraw_files

    done = redraw_files(
        images, style, out, strength, size, codec=codec, encoder=encoder, decoder=decoder
    )
    for path, reason in done.skipped:
        typer.echo(f"left out: {path}: {reason}", err=True)
    typer.echo(f"{len(done.written)} images written to {out}")
