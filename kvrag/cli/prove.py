"""The proof of one model as a table: what ``kvrag verify MODEL`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvrag.cli.output import console, facts, grid, print_json, progress
from kvrag.errors import UnsupportedModelError

if TYPE_CHECKING:
    from kvrag.model.proof import Proof

_COLUMNS = {"promise": False, "claim": False, "unit": False, "largest difference": True, "allowed": True, "": False}


def prove_model(model: str, *, dtype: str, device: str | None, max_error: float | None, as_json: bool) -> None:
    """Load a model, prove reuse on it anew, print the proof; exit status 1 where reuse is refused.

    Parameters
    ----------
    model, dtype, device
        As for :meth:`kvrag.KVRagEngine.from_pretrained`.
    max_error
        Largest difference of logits to pass with; ``None``: the proof's own limits alone.
    as_json
        Print JSON.
    """
    with progress(f"loading {model} ..."):
        from kvrag.model.load import load
        from kvrag.model.proof import prove
        from kvrag.model.source import ModelSource

        loaded = load(ModelSource(model, dtype=dtype, device=device, prove="off"))
    about = {
        "model": model,
        "architecture": loaded.lm.model.config.get_text_config().model_type,
        "dtype": str(loaded.lm.dtype).removeprefix("torch."),
        "device": str(loaded.lm.device),
        "versions": ", ".join(f"{name} {number}" for name, number in _versions().items()),
    }
    try:
        reusable = loaded.reusable
    except UnsupportedModelError as error:
        _show({**about, "result": f"REFUSED: {error}"}, None, as_json, is_passed=False)
        raise typer.Exit(1) from None
    with progress("proving that reuse is exact on this model ..."):
        proof = prove(reusable)
    is_passed = proof.passed and (max_error is None or proof.max_error <= max_error)
    about |= {
        "prompt": f"{proof.tokens} random tokens",
        "cost": f"{proof.seconds:.2f} s",
        "a planted mistake would differ by": f"{proof.fault:.2g} in logits",
    }
    if not proof.is_conclusive:
        about["caution"] = "roundings hide a planted mistake in this dtype; prove the model in float32 as well"
    about |= {f"note {number}": note for number, note in enumerate(proof.notes, start=1)}
    threshold = (
        "" if max_error is None else f" (largest difference of logits {proof.max_error:.1e}, at most {max_error:g})"
    )
    about["result"] = ("passed" if is_passed else "FAILED") + threshold
    _show(about, proof, as_json, is_passed=is_passed)
    if not is_passed:
        raise typer.Exit(1)


def _show(about: dict[str, str], proof: Proof | None, as_json: bool, *, is_passed: bool) -> None:
    if as_json:
        shown: dict[str, Any] = {} if proof is None else {"proof": proof.to_dict()}
        print_json({**about, "passed": is_passed, **shown})
        return
    out = console()
    if proof is not None:
        rows = [
            (c.promise, c.claim, c.unit, f"{c.error:.1e}", f"{c.limit:.1e}", "ok" if c.passed else "FAILED")
            for c in proof.checks
        ]
        out.print(grid("Reuse on this model against transformers' own forward", _COLUMNS, rows))
    out.print(facts("The proof", about))


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("kvrag", "torch", "transformers")}
