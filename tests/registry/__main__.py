"""Compares fasttfm with eager attention on every architecture in transformers' registry, at minimal size.

    python -m tests.registry                          every type, from its configuration
    python -m tests.registry --type bert --type gpt2  only these; nothing is recorded

Each type is compared (outputs and all gradients, with attn_implementation="fasttfm" and with accelerate()), refused by
name, or not built, with the reason. Status 1 if a type is none of these.
"""

import os
import signal
import warnings
from collections import Counter
from collections.abc import Sequence

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from benchmarks import command
from fasttfm.convert import huggingface
from tests.registry import small, verdicts

SECONDS = 40
"""Limit for a type; state space models with Python loops take minutes."""


class Late(BaseException):
    """Raised after SECONDS; not an Exception, because a model's exceptions are verdicts."""


def _late(*_: object) -> None:
    raise Late


def settle(name: str) -> tuple[str, dict[str, str]]:
    """Return "compared" or "refused", and the verdict of each way and batch; or "not built", and the reason."""
    try:
        signal.alarm(SECONDS)
        found = verdicts.verdicts(name)
    except (small.NotBuilt, Late) as error:
        return "not built", {"reason": str(error) or f"longer than {SECONDS} s"}
    finally:
        signal.alarm(0)
    by_name = {verdict for case, verdict in found.items() if case.startswith("by name")}
    return ("refused" if by_name == {"refused"} else "compared"), found


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.registry", __doc__)
    parser.add_argument("--type", action="append", help="one model type, or several in turn (default: all)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    huggingface.register()
    signal.signal(signal.SIGALRM, _late)
    classes = small.classes()
    types = list(classes) if args.type is None else args.type
    counts, wrong, forward, absent = Counter[str](), dict[str, str](), 0, Counter[str]()
    for kind in types:
        verdict, found = settle(str(classes.get(kind, "")))
        counts[verdict] += 1
        if verdict == "not built":
            absent[found["reason"].split(":")[0]] += 1
            print(f"{kind}: not built: {found['reason']}", flush=True)
            continue
        bad = {f"{kind}, {case}": each for case, each in found.items() if each not in verdicts.GOOD}
        forward += verdict == "compared" and "equal" not in found.values()
        print(f"{kind}: {verdict}: {bad or sorted(set(found.values()))}", flush=True)
        wrong |= bad
    print(f"{len(types)} types: {dict(counts)}, {forward} of the compared without gradients, {len(wrong)} wrong")
    if args.type is None:
        command.keep(
            args.results, "registry", transformers=transformers.__version__, types=len(types),
            counts={name: counts[name] for name in ("compared", "refused", "not built")}, without_gradients=forward,
            wrong=wrong, not_built=dict(absent.most_common()),
        )  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
