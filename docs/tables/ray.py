"""Precomputing and serving on Ray."""

from __future__ import annotations

from .core import Result, Tables, machine_of


def ray_kill(result: Result) -> str:
    """Say what became of chunks whose workers were killed."""
    places = ("in_store", "in_catalog", "documents")
    had = ", ".join(f"{result[place]:,}" for place in places)
    said = f"{result['kills']} workers were killed over {result['chunks']:,} chunks: "
    said += f"{result['stored']:,} were stored, {result['skipped']:,} skipped by the worker that took the batch again, "
    said += f"{result['failed']} failed. Store, catalog and documents then had {had}; "
    said += f"{result['other_bits']} chunks had other bits than one process gives. "
    said += f"It took {result['seconds']:.0f} s; a process without kills, on a disk, {result['single_process_seconds']:.0f} s.\n"
    return said + machine_of(result, "ray_kill.json")


def ray_scale(result: Result) -> str:
    """Set two workers beside one."""
    said = f"Two workers on two cores are **{result['ratio']:.2f} times** as quick as one on one core, and "
    said += f"**{result['ratio_same_cores']:.2f} times** as quick as one that has a second core for Ray's own processes.\n"
    return said + machine_of(result, "ray_scale.json")


def serving(result: Result) -> str:
    """Set routing by chunks beside routing by load, and say what a replica that is killed costs."""
    kill = result["kill"]
    hits, seconds = (
        {way: ", ".join(f"{run[key]:.2f}" for run in result[way]) for way in ("chunks", "load")}
        for key in ("hit_rate", "median_s")
    )
    said = f"Hits in memory by chunks: {hits['chunks']}; by load: {hits['load']}. "
    said += f"Median times in seconds: {seconds['chunks']}; {seconds['load']}. "
    said += f"With a replica killed under load, {kill['lost']} of {kill['requests']} requests were lost; "
    said += f"the slowest took {kill['slowest_s']:.1f} s.\n"
    return said + machine_of(result, "serving.json")


TABLES: Tables = {
    "ray-kill": ("ray_kill.json", ray_kill),
    "ray-scale": ("ray_scale.json", ray_scale),
    "serving": ("serving.json", serving),
}
