"""`python -m glm_jax` is the command `glm-jax`."""

import sys

from glm_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
