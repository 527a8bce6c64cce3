"""``kvrag calibrate``: find and keep the cheapest repair that reaches a target, on a model and a corpus, behind each context."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrag.cli.documents import example, read_documents, split_documents
from kvrag.cli.options import CALIBRATE, AsJson, Contexts, Given, name_model, open_engine, takes
from kvrag.cli.output import facts, grid, say, show

if TYPE_CHECKING:
    from kvrag.calibrate import Profile, Trial
    from kvrag.engine import KVRagEngine

_COLUMNS = "candidate|>repaired|>mean KL (nats)|>top-1|>computed"  # numbers of rows as shares of the prompt's
_MODEL = typer.Argument(metavar="[MODEL]", help="Hub id, directory, or .gguf file; may be set by KVRAG_MODEL.")
_CORPUS = typer.Option("--corpus", help="Text files or folders; default: the example documents of a checkout.")
_CHUNKS = typer.Option(min=1, help="Chunks per prompt: as many as you retrieve.")
_MIN_TOP1 = typer.Option(min=0, max=1, help="Smallest share of equal most likely tokens.")


@takes(engine=CALIBRATE)
def calibrate(
    engine: Given,
    ctx: typer.Context,
    words: Annotated[list[str] | None, _MODEL] = None,
    corpus: Annotated[list[Path] | None, _CORPUS] = None,
    chunk_context: Contexts = None,
    target_kl: Annotated[float, typer.Option(min=0, help="Largest mean KL per answer token, in nats.")] = 0.02,
    min_top1: Annotated[float, _MIN_TOP1] = 0.97,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts to make of the corpus.")] = 24,
    chunks: Annotated[int, _CHUNKS] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Size of a chunk aimed for, in tokens.")] = 250,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Find the repair that reaches a target at the least cost, on this model and your texts, and keep it as the default of both.

    Takes minutes for each --chunk-context (default: none), which may be repeated. Exit status 1 if all of them miss the target.
    """
    name_model(ctx, engine, words)
    documents = read_documents(corpus or [example("corpus", otherwise="pass --corpus")])
    options: Given = {"max_mean_kl": target_kl, "min_top1": min_top1, "prompts": prompts, "seed": seed}
    options["chunks_per_prompt"] = chunks
    found: dict[str, Found] = {}
    with ExitStack() as opened:
        for context in chunk_context or ["none"]:
            behind = open_engine({**engine, "chunk_context": context})
            found[context] = _calibrated(opened.enter_context(closing(behind)), documents, chunk_tokens, options)
    tables = [
        grid(f"Chunks behind the context {name[:40]!r}", _COLUMNS, map(_cells, f.trials)) for name, f in found.items()
    ]
    reached = {name: f.profile.kept.cost for name, f in found.items() if f.profile.is_reached}
    best = min(reached, key=lambda name: reached[name], default=None)
    kept = {f"behind {name[:40]!r}": _kept(f) for name, f in found.items()}
    kept["least cost"] = f"behind {best[:40]!r}" if best else "the target was MISSED; what has the least KL is kept"
    values = {name: {**asdict(f), "reached": name in reached} for name, f in found.items()}
    show({"contexts": values, "best": best}, *tables, facts("What was kept", kept), as_json=as_json, ok=bool(best))


@dataclass(frozen=True, slots=True)
class Found:
    """What one context came to, and the file that it is kept in."""

    profile: Profile
    trials: list[Trial]
    file: Path


def _calibrated(engine: KVRagEngine, documents: dict[str, str], chunk_tokens: int, options: Given) -> Found:
    from kvrag.calibrate import profile_file

    encoder = engine.loaded.encoder
    trials: list[Trial] = []
    split = split_documents(documents, lambda text: len(encoder.chunk_ids(text)), chunk_tokens=chunk_tokens)

    def note(trial: Trial) -> None:
        trials.append(trial)
        say(f"{len(trials)}. {', '.join(_cells(trial))}", err=True)

    profile = engine.calibrate([chunk.text for chunk in split], **options, on_trial=note)
    return Found(profile, trials, profile_file(engine))


def _kept(found: Found) -> str:
    result = "reached" if found.profile.is_reached else "missed"
    where = found.file if found.file.is_file() else f"nowhere: {found.file} can't be written"
    return f"{_cells(found.profile.kept)[0]}: target {result}; kept in {where}"


def _cells(trial: Trial) -> tuple[str, ...]:
    r = trial.repair
    ends = " to ".join(f"{end:.0%}" for end in r.probe_span)
    how = f"{r.strategy} {r.recompute_ratio:g}, first_k {r.first_k}, shift {r.shift:g}, layers {ends}"
    kl, top1 = f"{trial.mean_kl:.4f} ± {trial.kl_error:.4f}", f"{trial.top1:.1%} ± {trial.top1_error:.1%}"
    return ("none" if r.strategy == "none" else how, f"{trial.rows:.1%}", kl, top1, f"{trial.cost:.1%}")
