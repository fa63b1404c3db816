"""The benchmarks run in their smallest size, and their limits are those of the cost model; no timing counts."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jagg_jax import exact_plan, flow_sigmas, hat_plan, jagg_plan

ROOT = Path(__file__).resolve().parents[1]


def load_update_cost():
    spec = importlib.util.spec_from_file_location("update_cost", ROOT / "benchmarks" / "update_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_update_cost(*options):
    command = [sys.executable, "-m", "benchmarks.update_cost", *map(str, options)]
    # code that isn't optimised compiles in a third of the time
    fast = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | fast, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("group", "recomputed", "cached"),
    [(4, 1.5, 2.0), (5, 5 / 3, 2.5), (8, 2.0, 4.0)],  # exact 3W, JAGG W + 4, cached 6 for a group
)
def test_limits_of_the_cost_model(group, recomputed, cached):
    case = load_update_cost().Case
    sigmas = flow_sigmas(2 * group + 1)[: 2 * group]

    def cost(plan, remat, known):
        return case("plan", group, remat, known, plan, ()).counts()["cost"]

    exact, jagg = exact_plan(2 * group), jagg_plan(sigmas, group)
    assert cost(exact, "none", False) == cost(exact, "none", True) == 6 * group
    assert cost(exact, "none", False) / cost(jagg, "none", False) == pytest.approx(recomputed)
    assert cost(exact, "none", False) / cost(jagg, "none", True) == pytest.approx(cached)
    # a rematerialised forward is one more evaluation a backward: 4W, W + 6 and 8 for a group
    assert [cost(exact, "full", False), cost(jagg, "full", False), cost(jagg, "full", True)] == [
        8 * group,
        2 * group + 12,
        16,
    ]
    # two groups of hat share an anchor only when they are one step wider
    assert cost(hat_plan(sigmas, group), "none", True) == 12
    assert cost(hat_plan(sigmas, group + 1), "none", True) == 9


def test_update_cost_runs_and_writes_its_rows(tmp_path):
    path = tmp_path / "cost.json"
    finished = run_update_cost("--quick", "--remat", "full", "--output", path)
    assert finished.returncode == 0, finished.stderr
    assert "hat W+1, cached" in finished.stdout
    assert [entry.name for entry in tmp_path.iterdir()] == ["cost.json"]
    report = json.loads(path.read_text())
    assert set(report) == {"machine", "model", "settings", "rows"}
    assert report["machine"]["cpu_count"] >= 1
    assert report["model"]["parameters"] > 10_000
    rows = {(row["plan"], row["cached"]): row for row in report["rows"]}
    counts = ("num_steps", "forwards", "backwards", "rematerialised_forwards", "cost")
    assert {key: tuple(row[name] for name in counts) for key, row in rows.items()} == {
        ("exact", False): (8, 8, 8, 8, 32),
        ("exact", True): (8, 8, 8, 8, 32),
        ("jagg", False): (8, 8, 4, 4, 20),
        ("jagg", True): (8, 4, 4, 4, 16),
        ("hat", True): (8, 4, 4, 4, 16),
        ("hat W+1", True): (8, 3, 3, 3, 12),
    }
    assert [row["limit"] for row in rows.values()] == pytest.approx([1, 1, 1.6, 2, 2, 32 / 12])
    for row in rows.values():
        assert row["remat"] == "full"
        assert len(row["seconds"]) == report["settings"]["rounds"] == 1
        assert row["ratio_over_limit"] == pytest.approx(row["ratio"] / row["limit"])
        assert 0 < row["temp_bytes_one_anchor"] < row["temp_bytes"]
    # the programs that are timed compute gradients: known velocities change none, fewer anchors do
    norms = {key: row["gradient_norm"] for key, row in rows.items()}
    np.testing.assert_allclose(norms["exact", True], norms["exact", False], rtol=1e-4)
    np.testing.assert_allclose(norms["jagg", True], norms["jagg", False], rtol=1e-4)
    assert abs(norms["jagg", True] / norms["exact", True] - 1) > 1e-3
    # fewer stacked anchors hold fewer activations
    assert rows["hat W+1", True]["temp_bytes"] < rows["jagg", True]["temp_bytes"] < rows["exact", True]["temp_bytes"]


def test_a_setting_that_cannot_be_measured_is_refused():
    finished = run_update_cost("--steps-per-group", "2")
    assert finished.returncode == 2
    assert "steps_per_group is (2,); below 3 every plan is exact" in finished.stdout + finished.stderr
