"""The first section of a report: the outcome of each run, and how the arms differ."""

from collections import Counter
from collections.abc import Sequence

from jackpot.analysis.diagnose.diagnose import Diagnosis, diagnose
from jackpot.analysis.diagnose.saved import read_saved
from jackpot.training.run_folder.folder import measure_of
from jackpot.ui.charts import Section, Table
from jackpot.ui.error_bars import FEW_SEEDS, MOST_POINTS, describe_error_bars
from jackpot.ui.numbers import evaluated
from jackpot.ui.report.runs import Arm, Run, differing

_RESULTS = (  # columns of the table of runs
    *("run", "arm", "seed", "iterations", "policy before", "policy after"),
    *("rollout model before", "rollout model after", "verdict"),
)


def diagnoses(arms: Sequence[Arm]) -> list[tuple[Run, Diagnosis]]:
    """Diagnose every run, in the order of the arms."""
    runs = [run for arm in arms for run in arm.runs]
    return [(run, diagnose(run.lines, run.events, run.config, read_saved(run.folder, run.config))) for run in runs]


def summary_section(
    arms: Sequence[Arm],
    run_diagnoses: Sequence[tuple[Run, Diagnosis]],
    unreadable: Sequence[str],
    *further: Table,
) -> Section:
    """Return tables of results, verdicts, findings, differing settings, events and files that were left out.

    Tables without rows are left out.

    Args:
        arms: arms of the report.
        run_diagnoses: what `diagnoses` returns for the arms.
        unreadable: a sentence about each file that was left out.
        further: tables to add at the end.
    """
    runs = [(arm, run) for arm in arms for run in arm.runs]
    tables = [
        *_results(runs, [diagnosis for _, diagnosis in run_diagnoses]),
        Table(
            title="Diagnosis",
            columns=("run", "verdict"),
            rows=tuple((run.name, diagnosis.summary) for run, diagnosis in run_diagnoses),
        ),
        _findings(run_diagnoses),
        Table(
            title="Signs of the runs without a finding",
            columns=("run", "signs"),
            rows=tuple(
                (run.name, " ".join(diagnosis.coverage)) for run, diagnosis in run_diagnoses if not diagnosis.findings
            ),
        ),
        _settings(arms),
        _events([run for _, run in runs]),
        Table(title="Files left out", columns=("file",), rows=tuple((line,) for line in unreadable)),
        *further,
    ]

    return Section(title="Summary", intro=_intro(arms), items=tuple(table for table in tables if table.rows))


def _intro(arms: Sequence[Arm]) -> str:
    """Say how many runs and arms the report has, and how the lines of its charts average over seeds and are thinned."""
    runs = [run for arm in arms for run in arm.runs]
    sentences = [f"{_count(len(runs), 'run')} in {_count(len(arms), 'arm')}."]
    if any(len(arm.runs) > 1 for arm in arms):
        sentences.append(
            f"Lines are means over the seeds of an arm that have a number at that iteration; bands of fewer than "
            f"{FEW_SEEDS} seeds go {describe_error_bars(1)}, of more seeds {describe_error_bars(FEW_SEEDS)}."
        )
    if any(len(run.lines) > MOST_POINTS for run in runs):
        sentences.append(
            f"Lines of more than {MOST_POINTS} points are reduced to the smallest and the largest of each stretch."
        )
    return " ".join(sentences)


def _count(count: int, noun: str) -> str:
    """Format a count with its noun: 1 run, 2 runs."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _results(runs: Sequence[tuple[Arm, Run]], run_diagnoses: Sequence[Diagnosis]) -> list[Table]:
    """Return tables of the runs with accuracies, with rewards and without evaluation, so that a column has one unit."""
    rows: dict[str | None, list[tuple[str, ...]]] = {}
    for (arm, run), diagnosis in zip(runs, run_diagnoses, strict=True):
        # "accuracy" or "reward", as the first evaluation of the run says; None without evaluation.
        measure = next(filter(None, map(measure_of, run.lines)), None)
        row = (  # cells in the order of `_RESULTS`
            run.name,
            arm.name,
            str(run.config.seed),
            f"{max(run.iteration, 0)} of {run.config.iterations}",
            *_before_after(run, "policy"),
            *_before_after(run, "rollout_model"),
            diagnosis.verdict,
        )
        rows.setdefault(measure, []).append(row)

    sampling = ", ".join(sorted({run.config.evaluation_sampling.described for _, run in runs}))
    when = f"on held-out problems at the first and at the newest evaluation ({sampling})."
    notes = {"accuracy": f"Accuracy {when}", "reward": f"Mean reward {when}", None: "Nothing was evaluated."}
    return [
        Table(title="Runs", columns=_RESULTS, rows=tuple(rows[measure]), note=note)
        for measure, note in notes.items()
        if measure in rows
    ]


def _before_after(run: Run, role: str) -> tuple[str, str]:
    """Format a model's accuracy or mean reward at a run's first and newest evaluation."""
    values = [text for line in run.lines if (text := evaluated(line, role))]
    return (values[0], values[-1]) if values else ("-", "-")


def _findings(run_diagnoses: Sequence[tuple[Run, Diagnosis]]) -> Table:
    """Return a table of all findings of `diagnose` about the runs."""
    return Table(
        title="Findings, causes before their symptoms",
        columns=("run", "metric", "since iteration", "then", "now", "limit", "explanation", "suggestion"),
        rows=tuple(
            (
                run.name,
                finding.metric,
                str(finding.since),
                f"{finding.then:.3g}",
                f"{finding.now:.3g}",
                f"{'at most' if finding.side == 'above' else 'at least'} {finding.limit:.3g}",
                finding.explanation,
                finding.suggestion,
            )
            for run, diagnosis in run_diagnoses
            for finding in diagnosis.findings
        ),
    )


def _settings(arms: Sequence[Arm]) -> Table:
    """Return a table of the settings that differ between arms, a column for each arm."""
    return Table(
        title="Settings that differ",
        columns=("setting", *(arm.name for arm in arms)),
        rows=tuple((key, *values) for key, values in differing([arm.runs for arm in arms]).items()),
    )


def _events(runs: Sequence[Run]) -> Table:
    """Return a table with a row for each kind of event of each run: how often it happened, and the newest."""
    rows = []
    for run in runs:
        counts = Counter(event["event"] for event in run.events)
        newest = {event["event"]: event for event in run.events}
        for name, count in counts.items():
            details = ", ".join(
                f"{key} {f'{value:.4g}' if isinstance(value, float) else value}"
                for key, value in newest[name].items()
                if key not in ("event", "iteration", "time")
            )
            # At most 300 characters of an event, some of which list much.
            rows.append((run.name, name, str(count), str(newest[name]["iteration"]), details[:300]))

    columns = ("run", "event", "count", "newest at iteration", "details of the newest")
    return Table(title="Events", columns=columns, rows=tuple(rows))
