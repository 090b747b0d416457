"""As it is now: every layer by itself."""

import json
import sys

json.dump([[layer] for layer in range(len(json.load(sys.stdin)["layers"]))], sys.stdout)
