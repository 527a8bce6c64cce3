"""``kvrag calibrate``: find and keep the cheapest repair that reaches a target on a model and a corpus."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli.documents import example, read_documents, split_documents
from kvrag.cli.options import CALIBRATE, AsJson, Given, open_engine, takes
from kvrag.cli.output import facts, grid, progress, show

if TYPE_CHECKING:
    from kvrag.calibrate import Profile, Trial

_MODEL = typer.Argument(metavar="MODEL", envvar="KVRAG_MODEL", help="Hub id, directory, or .gguf file.")
_CORPUS = typer.Option("--corpus", help="Text files or folders; default: the example documents of a checkout.")
_CHUNKS = typer.Option(min=1, help="Chunks per prompt: as many as you retrieve.")
_MIN_TOP1 = typer.Option(min=0, max=1, help="Smallest share of equal most likely tokens.")


@takes(engine=CALIBRATE)
def calibrate(
    engine: Given,
    model: Annotated[str, _MODEL],
    corpus: Annotated[list[Path] | None, _CORPUS] = None,
    target_kl: Annotated[float, typer.Option(min=0, help="Largest mean KL per answer token, in nats.")] = 0.02,
    min_top1: Annotated[float, _MIN_TOP1] = 0.97,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts to make of the corpus.")] = 24,
    chunks: Annotated[int, _CHUNKS] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")] = 250,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find the repair that reaches a target at the least cost, on this model and your texts, and keep it as the default of both.

    Takes minutes. Give --chunk-context, --kv-dtype and the prefix as for precompute. Exit status 1 if the target was missed.
    """
    documents = read_documents(corpus or [example("corpus", otherwise="pass --corpus")])
    trials: list[Trial] = []
    with closing(open_engine({**engine, "model": model})) as opened:
        from kvrag.calibrate import profile_file

        encoder = opened.loaded.encoder
        split = split_documents(documents, lambda text: len(encoder.chunk_ids(text)), chunk_tokens=chunk_tokens)
        with progress(f"calibrating on {prompts} prompts of {chunks} chunks ...") as status:

            def note(trial: Trial) -> None:
                trials.append(trial)
                status.console.print(f"{len(trials)}. {', '.join(_cells(trial))}", highlight=False, soft_wrap=True)

            options: Given = {"max_mean_kl": target_kl, "min_top1": min_top1, "prompts": prompts, "seed": seed}
            texts = [chunk.text for chunk in split]
            profile = opened.calibrate(texts, **options, chunks_per_prompt=chunks, on_trial=note)
        file = profile_file(opened)
    found = {**asdict(profile), "reached": profile.is_reached, "trials": [asdict(t) for t in trials], "file": file}
    table = grid(
        "Reuse against full prefill", "candidate|>repaired|>mean KL (nats)|>top-1|>computed", map(_cells, trials)
    )
    show(found, table, facts(f"Profile of {model}", _kept(profile, file)), as_json=as_json, ok=profile.is_reached)


def _kept(profile: Profile, file: Path) -> dict[str, object]:
    result = "reached" if profile.is_reached else "MISSED; the trial with the least KL is kept"
    limits = (
        f"mean KL at most {profile.max_mean_kl:g}, top-1 at least {profile.min_top1:.0%}, each by its standard error"
    )
    where = file if file.is_file() else f"nowhere: {file} can't be written"
    return {"repair": _cells(profile.kept)[0], "target": f"{limits}: {result}", "kept in": where}


def _cells(trial: Trial) -> tuple[str, ...]:
    r = trial.repair
    ends = " to ".join(f"{end:.0%}" for end in r.probe_span)
    how = f"{r.strategy} {r.recompute_ratio:g}, first_k {r.first_k}, shift {r.shift:g}, layers {ends}"
    kl, top1 = f"{trial.mean_kl:.4f} ± {trial.kl_error:.4f}", f"{trial.top1:.1%} ± {trial.top1_error:.1%}"
    return (
        "none" if r.strategy == "none" else how,
        f"{trial.rows:.1%}",
        kl,
        top1,
        f"{trial.cost:.1%}",
    )  # shares of the prompt's rows
