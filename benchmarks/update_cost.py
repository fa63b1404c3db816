"""What the gradient of one GRPO update costs under each backward plan, measured against the cost model's limit.

    python -m benchmarks.update_cost --steps-per-group 4 5 8 --output update_cost.json

Times `policy_gradient`, traced as the trainer traces it, on a rollout's first 2W steps with a randomly initialised DiT.
All programs are compiled and run once, then timed in turns (A B C A B C ...), so that a slow moment of the machine
falls on all of them; a row reports its median.

The limit counts model evaluations: a forward costs 1, a backward 2, a rematerialised forward 1 more. Velocities known
from the rollout ("cached") spare the steps between the anchors. They spare `exact` nothing: each of its forwards
belongs to a vector-Jacobian product. With 2W steps `hat` has as many anchors as `jagg`, so their cached rows run one
program and differ by the clock's noise alone; `hat W+1` widens the groups to W + 1 steps, which saves an anchor.

With rematerialisation (remat "full") the layers are scanned: where they are repeated in the program, XLA on a CPU finds
the recomputation and drops it.

Memory is the compiler's own figure for temporary buffers, not a reading of the process.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jagg_jax import BackwardPlan, FlowSDE, exact_plan, flow_sigmas, hat_plan, jagg_plan
from jagg_jax.models.dit import DiT, DiTConfig
from jagg_jax.models.functional import as_function, count_parameters
from jagg_jax.rollout import Transitions, rollout
from jagg_jax.update import Objective, policy_gradient

IMAGE_SHAPE, PROMPT_LENGTH, VOCAB_SIZE = (16, 64, 1), 4, 11
SHAPES = {"image_shape": IMAGE_SHAPE, "prompt_length": PROMPT_LENGTH, "vocab_size": VOCAB_SIZE, "patch_shape": (4, 4)}
OBJECTIVE = Objective(FlowSDE(0.7), (0.2, 0.2))
# programs that are not timed skip LLVM's optimisation: faster to compile, and on CPUs their buffers are the same
UNOPTIMISED = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured, and how often. Raises ValueError for a setting that can't be."""

    steps_per_group: tuple[int, ...] = (4, 5, 8)
    """Values of W; each is measured on 2W trained steps."""
    rounds: int = 5
    """Timed runs of every program; the median counts."""
    width: int = 256
    """Elements of a token."""
    depth: int = 3
    """Transformer blocks."""
    batch: int = 4
    """Samples in an update."""
    remat: tuple[Literal["none", "full"], ...] = ("none", "full")
    """Whether each block recomputes its activations in the backward pass."""
    output: Path | None = None
    """JSON file for the rows; none is written by default."""
    quick: bool = False
    """The smallest size, to see that everything runs: overrides W, rounds, width, depth and batch."""

    def __post_init__(self):
        for name in ("rounds", "width", "depth", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.steps_per_group or min(self.steps_per_group) < 3:
            raise ValueError(f"steps_per_group is {self.steps_per_group}; below 3 every plan is exact, give more")
        if not self.remat:
            raise ValueError("remat is empty; name none, full or both")
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise ValueError(f"output is {self.output}; its folder does not exist, create it first")

    def resolved(self) -> "Options":
        small = {"steps_per_group": (4,), "rounds": 1, "width": 32, "depth": 1, "batch": 2}
        return dataclasses.replace(self, **small) if self.quick else self


class Case(NamedTuple):
    """One row of the table: a plan, and its program's other arguments (params, transitions, advantages, tokens)."""

    plan_name: str
    steps_per_group: int
    remat: str
    cached: bool
    plan: BackwardPlan
    arguments: tuple[Any, ...]

    @property
    def program(self) -> tuple[int, int, str, bool]:
        """Cases that agree in this run the same compiled program: the plan's values are data."""
        return self.plan.num_steps, self.plan.num_anchors, self.remat, self.cached

    def counts(self) -> dict[str, int]:
        """Model evaluations of one gradient; anchors are evaluated and linearised, the other steps only evaluated."""
        steps, anchors = self.plan.num_steps, self.plan.num_anchors
        forwards, rematerialised = anchors if self.cached else steps, anchors if self.remat == "full" else 0
        cost = forwards + 2 * anchors + rematerialised
        return {"forwards": forwards, "backwards": anchors, "rematerialised_forwards": rematerialised, "cost": cost}


def make_models(options: Options) -> tuple[dict[str, Any], Any]:
    """Velocity functions by rematerialisation, and the random parameters that they share."""
    models = {}
    for remat in options.remat:
        size = {"width": options.width, "depth": options.depth}
        config = DiTConfig(**SHAPES, **size, remat=remat, scan_layers=remat == "full")
        models[remat], params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    generator = np.random.default_rng(0)
    # a new DiT's gates and output are zero; these are not, so that no product is one with zeros
    noisy = [p + 0.02 * generator.standard_normal(p.shape, np.float32) for p in jax.tree.leaves(params)]
    return models, jax.tree.unflatten(jax.tree.structure(params), noisy)


def sample_transitions(velocity_fn, params, num_steps: int, tokens: jax.Array) -> Transitions:
    """The first `num_steps` steps of a rollout, with their velocities."""

    def sample(params, noise, keys):
        arguments = (velocity_fn, params, noise, flow_sigmas(num_steps + 1), keys, tokens)
        return rollout(*arguments, sampler=OBJECTIVE.sampler, keep_velocities=True).transitions(num_steps)

    keys = jax.random.split(jax.random.key(0), tokens.shape[0])
    noise = jax.random.normal(jax.random.key(1), (tokens.shape[0], *IMAGE_SHAPE))
    return jax.jit(sample, compiler_options=UNOPTIMISED)(params, noise, keys)


def make_cases(options: Options, models: dict[str, Any], params: Any) -> list[Case]:
    tokens = jnp.arange(options.batch * PROMPT_LENGTH, dtype=jnp.int32).reshape(options.batch, -1) % VOCAB_SIZE
    advantages = jnp.asarray(np.resize([1.0, -1.0], options.batch), jnp.float32)
    cases: list[Case] = []
    for group in options.steps_per_group:
        transitions = sample_transitions(next(iter(models.values())), params, 2 * group, tokens)
        exact, jagg, sigmas = exact_plan(2 * group), jagg_plan(transitions.sigmas, group), transitions.sigmas
        plans = [("exact", False, exact), ("exact", True, exact), ("jagg", False, jagg), ("jagg", True, jagg)]
        plans += [("hat", True, hat_plan(sigmas, group)), ("hat W+1", True, hat_plan(sigmas, group + 1))]
        arguments = (params, transitions, advantages, tokens)
        cases += [Case(name, group, remat, cached, plan, arguments) for remat in models for name, cached, plan in plans]
    return cases


def lower(velocity_fn, case: Case, batch_anchors: int | None):
    """The gradient as the trainer traces it: the plan is an argument, not a constant."""

    def gradient(plan, *arguments):
        settings = {"use_cached": case.cached, "batch_anchors": batch_anchors}
        return policy_gradient(velocity_fn, *arguments, objective=OBJECTIVE, plan=plan, **settings)

    return jax.jit(gradient).lower(case.plan, *case.arguments)


def compile_programs(models: dict[str, Any], cases: list[Case], quick: bool) -> dict[tuple, tuple]:
    """Every program that the cases need, and its temporary bytes with all anchors stacked and with one at a time."""
    distinct = {case.program: case for case in cases}

    def build(case: Case) -> tuple[Any, dict[str, int]]:
        run = lower(models[case.remat], case, None).compile(UNOPTIMISED if quick else None)
        one_anchor = lower(models[case.remat], case, 1).compile(UNOPTIMISED)
        sizes = [program.memory_analysis().temp_size_in_bytes for program in (run, one_anchor)]
        return run, {"temp_bytes": sizes[0], "temp_bytes_one_anchor": sizes[1]}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = track(pool.map(build, distinct.values()), "Compiling", len(distinct), console=Console(stderr=True))
        return dict(zip(distinct, built, strict=True))


def measure(options: Options, cases: list[Case], programs: dict[tuple, tuple]) -> list[dict[str, Any]]:
    """Seconds of every case in every round, in turns, and the norm of its gradient from the warm-up."""
    results = []
    for case in cases:
        gradient, _ = programs[case.program][0](case.plan, *case.arguments)
        results.append({"gradient_norm": float(optax.tree.norm(gradient)), "seconds": []})
    for _ in track(range(options.rounds), "Timing", console=Console(stderr=True)):
        for case, result in zip(cases, results, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(programs[case.program][0](case.plan, *case.arguments))
            result["seconds"].append(time.perf_counter() - start)
    return results


def make_rows(cases: list[Case], programs: dict[tuple, tuple], results: list[dict]) -> list[dict[str, Any]]:
    """One row a case, compared with `exact`, recomputed, at the same W and rematerialisation."""
    rows = []
    for case, result in zip(cases, results, strict=True):
        row = {"plan": case.plan_name, "cached": case.cached, "remat": case.remat}
        row |= {"steps_per_group": case.steps_per_group, "num_steps": case.plan.num_steps, **case.counts()}
        row |= {"median_seconds": statistics.median(result["seconds"]), **result}
        rows.append(row | programs[case.program][1])
    exact = {(r["steps_per_group"], r["remat"]): r for r in rows if r["plan"] == "exact" and not r["cached"]}
    for row in rows:
        base = exact[row["steps_per_group"], row["remat"]]
        ratio, limit = base["median_seconds"] / row["median_seconds"], base["cost"] / row["cost"]
        row |= {"ratio": ratio, "limit": limit, "ratio_over_limit": ratio / limit}
        for name in ("temp_bytes", "temp_bytes_one_anchor"):
            row[f"{name}_over_exact"] = row[name] / base[name]
    return rows


def describe(options: Options, params: Any) -> dict[str, Any]:
    """The machine, the model and the settings behind the rows."""
    machine = {"cpu_count": os.cpu_count(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    settings = {name: value for name, value in dataclasses.asdict(options).items() if name != "output"}
    return {"machine": machine, "model": {"parameters": count_parameters(params), **SHAPES}, "settings": settings}


def print_table(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    settings = ", ".join(f"{name} {value}" for part in facts.values() for name, value in part.items())
    caption = f"Ratio: exact / this. MiB: compiled temporary memory, then with batch_anchors=1.\n{settings}"
    table = Table(title="Cost of one update's gradient", caption=caption)
    table.add_column("plan", no_wrap=True)
    counts = ("W", "remat", "forwards", "backwards", "median s", "ratio", "limit", "ratio/limit")
    for header in (*counts, "MiB", "/ exact", "MiB, 1 anchor", "/ exact"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row['plan']}, {'cached' if row['cached'] else 'recomputed'}", str(row["steps_per_group"])]
        cells += [row["remat"], str(row["forwards"]), str(row["backwards"])]
        cells += [f"{row['median_seconds']:.4f}", *(f"{row[k]:.2f}" for k in ("ratio", "limit", "ratio_over_limit"))]
        for key in ("temp_bytes", "temp_bytes_one_anchor"):
            cells += [f"{row[key] / 2**20:.1f}", f"{row[f'{key}_over_exact']:.2f}"]
        table.add_row(*cells, end_section=row["plan"] == "hat W+1")
    console = Console()
    console.width = max(console.width, 150)  # a table piped into a file is not cut at 80 columns
    console.print(table)


def main() -> int:
    try:
        options = tyro.cli(Options, description=__doc__).resolved()
        models, params = make_models(options)
    except ValueError as error:
        print(f"update_cost: {error}", file=sys.stderr)
        return 2
    cases = make_cases(options, models, params)
    programs = compile_programs(models, cases, options.quick)
    rows = make_rows(cases, programs, measure(options, cases, programs))
    print_table(facts := describe(options, params), rows)
    if options.output is not None:
        temporary = options.output.with_name(f".{options.output.name}.tmp")
        temporary.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        os.replace(temporary, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
