"""Every architecture that transformers registers, as small as it can be made: on eager attention beside fasttfm.

    python -m tests.registry                          every type, from its configuration alone
    python -m tests.registry --transformers DIR       also by the tiny models of transformers' own tests
    python -m tests.registry --type bert --type gpt2  these alone; nothing is recorded

Each type is compared (outputs, and gradients of every parameter, by attn_implementation="fasttfm" and by accelerate()),
refused by name, or could not be made, with the reason. Status 1 where a type is none of these.
"""

import os
import signal
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from benchmarks import command
from fasttfm.errors import UserError
from fasttfm.interop import huggingface
from tests.registry import small, testers, verdicts

SECONDS = 40
"""Of a type; loops of state space models in plain Python take minutes."""


class Late(BaseException):
    """SECONDS are over; no Exception, of which a model's are verdicts."""


def _late(*_: object) -> None:
    raise Late


def settle(kind: str, name: str, cases: list[type]) -> tuple[str, dict[str, str]]:
    """Return the verdict on a model type (compared, refused or not built), and by way and batch what was found, or the
    reason."""
    reasons = {}
    ways: list[Any] = [
        lambda: verdicts.verdicts(name),
        *((lambda c=c: verdicts.compared(*verdicts.of_tester(c))) for c in cases),
    ]
    for i, way in enumerate(ways):
        try:
            signal.alarm(SECONDS)
            found = way()
        except Late:
            reasons[f"try {i}"] = f"longer than {SECONDS} s"
            continue
        except small.NotBuilt as error:
            reasons[f"try {i}"] = str(error)
            continue
        finally:
            signal.alarm(0)
        by_name = {verdict for case, verdict in found.items() if case.startswith("by name")}
        return ("refused" if by_name == {"refused"} else "compared"), found
    return "not built", reasons


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.registry", __doc__)
    parser.add_argument("--transformers", type=Path, metavar="DIR", help="a checkout with its tests")
    parser.add_argument("--type", action="append", help="one model type, or several in turn (default: all)")
    args = parser.parse_args(argv)
    if args.transformers is not None and not args.transformers.joinpath(testers.FOLDER).is_dir():
        raise UserError(f"--transformers {args.transformers} has no {testers.FOLDER}: give a checkout of transformers")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    huggingface.register()
    signal.signal(signal.SIGALRM, _late)
    cases = testers.cases(args.transformers) if args.transformers is not None else {}
    classes = small.classes()
    types = sorted({*classes, *cases}) if args.type is None else args.type
    counts, wrong, forward, absent = Counter[str](), dict[str, str](), 0, Counter[str]()
    for kind in types:
        verdict, found = settle(kind, str(classes.get(kind, "")), cases.get(kind, []))
        counts[verdict] += 1
        if verdict == "not built":
            absent[list(found.values())[-1].split(":")[0]] += 1
            print(f"{kind}: not built: {' | '.join(found.values())}", flush=True)
            continue
        bad = {f"{kind}, {case}": each for case, each in found.items() if each not in verdicts.GOOD}
        forward += verdict == "compared" and "equal" not in found.values()
        print(f"{kind}: {verdict}: {bad or sorted(set(found.values()))}", flush=True)
        wrong |= bad
    print(f"{len(types)} types: {dict(counts)}, {forward} of the compared without gradients, {len(wrong)} wrong")
    if args.type is None:
        counted = {name: counts[name] for name in ("compared", "refused", "not built")}
        command.keep(
            args.results,
            "registry",
            transformers=transformers.__version__,
            testers=args.transformers is not None,
            types=len(types),
            counts=counted,
            without_gradients=forward,
            wrong=wrong,
            not_built=dict(absent.most_common()),
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
