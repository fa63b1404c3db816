"""Train, evaluate and sample: `python train.py --help`."""

import sys

from jagg_jax.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
