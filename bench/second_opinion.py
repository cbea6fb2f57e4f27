"""Our losses against those of the TRL that is installed, on random inputs: values and gradients. Nothing is fetched.

.venv-trl/bin/python -m bench.second_opinion --inputs 300
"""

import argparse

from tests.unit.algo.freeze_peers import trl
from tests.unit.algo.peers import OURS, digest, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=300)
    options = parser.parse_args()
    for name, theirs in trl().items():
        worst = 0.0
        for number in range(options.inputs):
            pairs = zip(digest(*OURS[name](made(number))), digest(*theirs(made(number))), strict=True)
            worst = max(worst, *(abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs))
        print(f"{name:<16} {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
