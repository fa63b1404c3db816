"""The README's example runs as printed, and what it lists agrees with the packaging."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[1]


def test_the_import_example_runs_and_is_the_jagg_gradient():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    with jax.numpy_rank_promotion("allow"):
        exec(example, names)
        params, latents, sigmas = names["params"], names["latents"], names["sigmas"]

        def every_step(p):
            velocities = [
                names["velocity_fn"](p, latents[j], jnp.full(2, sigmas[j]), names["prompt"]) for j in range(4)
            ]
            return jnp.mean(jnp.stack(velocities) ** 2)

        exact, gradient = jax.grad(every_step)(params)["w"], names["gradient"]["w"]
    cosine = jnp.sum(exact * gradient) / jnp.linalg.norm(exact) / jnp.linalg.norm(gradient)
    assert gradient.shape == (4, 4)
    assert 0.95 < cosine < 1.0  # close to the exact gradient, and not the same


def test_requirements_are_those_of_the_train_extra():
    listed = {line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()} - {""}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed == {*project["dependencies"], *project["optional-dependencies"]["train"]}
