"""All records as one HTML page that needs nothing else, as Markdown, and as README's table.

    python -m benchmarks report              docs/benchmark-report/index.html, report.md and figures/
    python -m benchmarks report --readme     README's table too

The page is made anew wherever it is wanted; report.md and its figures are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.limits import roofline_decode as decode
from benchmarks.limits import roofline_step as steps
from benchmarks.limits.devices import DEVICES, H200_SUSTAINED
from benchmarks.limits.static_evidence import HEAD, LABEL, measured_us, predictions, row, works
from benchmarks.measure.machine import ROOT
from benchmarks.measure.result_files import RESULTS, Loaded, is_cpu, load, machine_name
from benchmarks.report import document as report_document
from benchmarks.report import readme_table
from benchmarks.report import runs as report_runs
from benchmarks.report import suite as report_suite
from benchmarks.report.document import Block, Heading, Notice, Section, Table, Text
from benchmarks.report.headline import claims
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError
from fasttfm.kernels.proof import budgets

OUT = ROOT / "docs" / "benchmark-report"
TITLE = "fasttfm: benchmark report"


def lead(files: Loaded) -> list[Block]:
    """What a reader must know before any figure."""
    counts = Counter(entry.record["status"] for entry in files.suite)
    devices = sorted({machine_name(entry.machine) for entry in files.entries if not is_cpu(entry.machine)})
    if not devices:
        notice = (
            "CPU. Every time on this page was taken on a CPU. No GPU has run these kernels: nothing here is a GPU time."
        )
    else:
        notice = f"Timed on {', '.join(devices)}; figures marked CPU on a CPU. No other device has run these kernels."
    blocks: list[Block] = [
        Text(
            "The encoder-decoder Transformer beside its peers, in one run each, with the physical limit in every row."
        ),
        Notice(notice),
    ]
    if files.suite:
        blocks.append(
            Text(
                f"{len(files.suite)} rows of the suite: {counts['timed']} timed, {counts['refused']} refused by their "
                f"provider, {counts['wrong']} wrong (no time is printed for wrong numbers), {counts['absent']} absent "
                "here. Bars show the median run; whiskers and bands its p20 to p80. Numerics are checked before any "
                "time; providers take turns on rotating random inputs and cold caches."
            )
        )
    else:
        blocks.append(Text("No row of the suite is recorded yet: `python -m benchmarks` writes them."))
    return blocks


def _machines(files: Loaded) -> Section:
    fields = ("system", "torch", "triton", "fasttfm", "python", "driver", "cuda")
    result = Counter(
        (machine_name(entry.machine), *(str(entry.machine.get(name) or "") for name in fields))
        for entry in files.entries
    )
    rows = [(*cells, str(count)) for cells, count in sorted(result.items())]
    return Section("machines", "Machines", [Table(("machine", *fields, "records"), rows, names=8)])


def _limits() -> Section:
    """The model of limits: devices, a step on each, where the step goes."""
    base, tokens = steps.MODELS["paper-base"], 25_000
    rows = []
    for device in (*DEVICES.values(), H200_SUSTAINED):
        cells = [
            device.name,
            device.chip,
            device.source,
            f"{device.half:,.0f}",
            f"{device.fp32:,.0f}",
            f"{device.bandwidth:,.0f}",
        ]
        for shape in steps.MODELS.values():
            fused = steps.total(steps.step(shape, device.machine("bfloat16"))).fused
            cells += [f"{fused:,.1f}", f"{1e3 * tokens / fused:,.0f}"]
        one = decode.decoding_step(base, device.machine("bfloat16"), batch=128)
        rows.append((*cells, f"{one.device_us:,.0f}"))
    head = (
        *("device", "chip", "rates from", "half TFLOP/s", "fp32 TFLOP/s", "GB/s", "base step ms", "base tokens/s"),
        *("big step ms", "big tokens/s", "decode step µs"),
    )
    blocks: list[Block] = [
        Text(
            "Computed from shapes and the vendors' rates, **not measured**: no implementation can be faster. A step is "
            "25,000 source and target tokens without padding in half precision; a decode step 128 sentences, beam 4, "
            "paper-base, without launches."
        ),
        Table(head, rows, names=3),
    ]
    for model, shape in steps.MODELS.items():
        parts = steps.step(shape, H200_SUSTAINED.machine("bfloat16"))
        useful = steps.model_flops(shape)
        blocks += [
            Heading(f"Where a step of {model} must go on one H200 that sustains 790 TFLOP/s and 4.3 TB/s"),
            Table(
                ("floor ms", "PyTorch eager", "compile + SDPA + fused Adam", "fused", "of which products"),
                steps.cells(parts),
            ),
            Text(
                f"{useful / 1e12:.2f} TFLOP a step, {useful / tokens / 1e9:.3f} GFLOP a target token. "
                "Modelled, not measured."
            ),
        ]
    return Section("limits", "What each device allows", blocks)


def _static(files: Loaded) -> Section:
    """Predictions by kernel and device, then everything that they were made from."""
    result = predictions()
    # a chip for which hardly a kernel is recorded would be a column of blanks; the folded table has it
    devices = [name for name in DEVICES if 2 * sum(p.device.name == name for p in result) > len(works())]
    rows = []
    for work in works():
        cells = [work.title]
        for name in devices:
            one = next((p for p in result if p.work == work and p.device.name == name), None)
            measured = measured_us(one, files) if one else "-"
            cells.append("" if one is None else f"{one.us:,.0f}" + (f" / **{measured}**" if measured != "-" else ""))
        if any(cells[1:]):
            rows.append(cells)
    version, _ = budgets.read()
    return Section(
        "static",
        "Static evidence",
        [
            Notice(f"Times in this section are {LABEL}."),
            Text(
                f"Every kernel is compiled for every chip by Triton {version} without the device. From the machine "
                "code's registers, spills, shared memory and matrix instructions, and from the bytes and FLOPs that "
                "the work needs, follows the time in µs below, half precision; **bold** behind a stroke: measured on "
                "that device. Empty: no case of that kernel is recorded for the chip."
            ),
            Table(("work", *devices), rows),
            Table(HEAD, [row(p, files) for p in result], names=2, folded="Registers, spills, shared memory, occupancy"),
        ],
    )


def _claims(files: Loaded) -> Section:
    rows = [
        (claim.what, claim.figure.replace("\\|", "|"), f"`{claim.command}`", claim.origin, claim.locations)
        for claim in claims(files)
    ]
    return Section(
        "claims",
        "Claims and their records",
        [
            Text(
                "Every measured figure, README's among them, where it stands in `benchmarks/results` (file:line) "
                "and how to run it again."
            ),
            Table(("claim", "figure", "command", "of commit", "record"), rows, names=5),
        ],
    )


def _absent(files: Loaded) -> Section | None:
    result = Counter(
        (entry.provider, str(entry.record["reason"]), machine_name(entry.machine))
        for entry in files.suite
        if entry.record["status"] == "absent"
    )
    if not result:
        return None
    rows = [(provider, f"`{why}`", machine, str(count)) for (provider, why, machine), count in sorted(result.items())]
    head = ("provider", "to have it", "machine", "rows")
    return Section("absent", "Absent providers", [Table(head, rows, names=3)])


def sections(files: Loaded) -> list[Section]:
    """Of the page, in order."""
    result = [
        _claims(files),
        *report_suite.sections(files),
        report_runs.end_to_end(files),
        report_runs.time_line(files),
        _static(files),
        _limits(),
        _absent(files),
        _machines(files),
    ]
    return [section for section in result if section is not None]


def write(files: Loaded, out: Path) -> None:
    """index.html, report.md and figures/ in the folder; figures that are no longer shown go."""
    beginning, parts = lead(files), sections(files)
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        for old in (out / "figures").glob("*.svg"):
            old.unlink()
        (out / "index.html").write_text(report_document.html(TITLE, beginning, parts), encoding="utf-8")
        (out / "report.md").write_text(report_document.markdown(TITLE, beginning, parts), encoding="utf-8")
        for figure in report_document.figures(beginning, parts):
            file = out / "figures" / f"{figure.name}.svg"
            file.write_text(figure.svg, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written to ({error.strerror}): name another folder") from error


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks report", description="One page from all records; README's table.")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder or file of records (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report (default: %(default)s)")
    parser.add_argument("--readme", action="store_true", help="write README's table of measured figures too")
    args = parser.parse_args(argv)
    files = load(args.results)
    write(files, args.out)
    print(f"{len(files.entries)} records: {args.out / 'index.html'}, {args.out / 'report.md'}")
    if args.readme:
        changed = readme_table.write(files)
        print(f"README's table {'is new' if changed else 'is as the records have it'}")
    return 0
