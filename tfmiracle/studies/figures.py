"""A study's records as the figures of Lin et al. (2023). Needs matplotlib to draw."""

import io

import numpy as np

from tfmiracle.studies.records import (
    PARAMETERIZATIONS,
    block_sizes,
    budget_bits,
    converged_iterations,
    mean_and_error,
    pruning_curve,
    runs,
    variational,
)

FIGURES = ("dynamics", "histograms", "pruning")

# Colours of Okabe and Ito, which the colour-blind can tell apart; in grey, the one is
# dark and dashed or hatched, the other light and solid.
_COLORS = {"mean_var": "#0072B2", "mean_kl": "#E69F00"}
_LINES = {
    p: {"color": _COLORS[p], "linestyle": style, "label": PARAMETERIZATIONS[p]}
    for p, style in (("mean_var", (0, (4, 1.5))), ("mean_kl", "-"))
}
_BARS = {
    p: {"facecolor": (_COLORS[p], 0.35), "edgecolor": _COLORS[p], "hatch": hatch}
    for p, hatch in (("mean_var", "//////"), ("mean_kl", None))
}
# Open around filled, so that both are seen where the curves are the same.
_POINTS = {
    "mean_var": {"marker": "s", "markersize": 6.5, "markerfacecolor": "none"},
    "mean_kl": {"marker": "o", "markersize": 3.5},
}
_CONVERGED = {
    p: {"color": _COLORS[p], "marker": m, "markersize": 6, "markeredgecolor": "black"}
    for p, m in (("mean_var", "s"), ("mean_kl", "o"))
}
_BUDGET = {"color": "0.3", "linewidth": 0.8, "linestyle": ":", "label": "budget"}
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.hashsalt": "tfmiracle",
}
_WIDTH = 6.75  # inches, the text width of the paper


def draw_figures(records: list[dict]) -> dict[str, dict[str, bytes]]:
    """Those of `FIGURES` that the records have data for, each as "png" and "svg".

    The same records make the same bytes, whatever the user's settings of matplotlib.

    Raises:
      ValueError: if matplotlib is missing.
    """
    try:
        import matplotlib.style
    except ImportError as error:
        raise ValueError(
            "The figures of a report need matplotlib. Install it with "
            "pip install 'tfmiracle[report]'."
        ) from error
    with matplotlib.style.context(["default", _STYLE]):
        drawn = zip(FIGURES, (_dynamics, _histograms, _pruning))
        figures = {name: draw(records) for name, draw in drawn}
        return {name: _saved(f) for name, f in figures.items() if f is not None}


def _saved(figure):
    # Neither a date nor the version of matplotlib, so that bytes can be compared.
    without = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    found = {}
    for suffix, metadata in without.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, metadata=metadata)
        found[suffix] = buffer.getvalue()
        figure.set_layout_engine("none")  # the places of the first are for both
    return found


def _figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _legend(figure, handles):
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))


def _curve(axis, parameterization, x, y, low, high, **style):
    axis.plot(x, y, **_LINES[parameterization], **style)
    color = _COLORS[parameterization]
    axis.fill_between(x, low, high, color=color, alpha=0.3, linewidth=0)


def _dynamics(records):
    """Cross-entropy and KL in variational training; None without such a phase."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator

    records = [r for r in records if len(variational(r["curve"], "step"))]
    if not records:
        return None
    sizes = block_sizes(records)
    figure = _figure(_WIDTH * max(1, len(sizes) / 3), 3.6)
    axes = figure.subplots(2, len(sizes), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), block_size in zip(axes.T, sizes):
        for p in PARAMETERIZATIONS:
            found = runs(records, p, block_size)
            if not found:
                continue
            iterations, _ = mean_and_error(converged_iterations(found))
            for axis, key in ((upper, "cross_entropy"), (lower, "kl_bits")):
                step, mean, low, high = over_seeds(found, key)
                _curve(axis, p, step, mean, low, high)
                if iterations is None:
                    continue
                place = iterations, np.interp(iterations, step, mean)
                axis.plot(*place, zorder=3, **_CONVERGED[p])
                if axis is upper:
                    style = {"textcoords": "offset points", "ha": "center", "size": 7}
                    axis.annotate(f"{iterations / 1000:.3g}", place, (0, 6), **style)
        upper.set_title(f"Blocks of {block_size} weights")
        budgets = {budget_bits(r) for r in records if r["block_size"] == block_size}
        for budget in budgets:
            lower.axhline(budget, **_BUDGET)
        lower.set_xlabel("Optimizer steps (thousands)")
        lower.set_xlim(left=0)
        lower.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}")
    for axis in axes.flat:
        if np.isfinite(axis.dataLim.minposy):  # there is something positive
            axis.set_yscale("log")
    for axis in axes[1]:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    axes[0][0].set_ylabel("Cross-entropy (nats)")
    axes[1][0].set_ylabel("KL of a block (bits)")
    figure.align_ylabels(axes[:, 0])
    handles = []
    for p in PARAMETERIZATIONS:
        mark = {"linestyle": "", "label": "converged", **_CONVERGED[p]}
        handles += [Line2D([], [], **_LINES[p]), Line2D([], [], **mark)]
    _legend(figure, [*handles, Line2D([], [], **_BUDGET)])
    return figure


def over_seeds(found, key):
    """Steps, mean, least and largest value over the runs, where any has one."""
    curves = [[variational(r["curve"], k) for k in ("step", key)] for r in found]
    steps = np.unique(np.concatenate([step for step, _ in curves]))
    values = np.ma.masked_invalid(
        [np.interp(steps, *curve, left=np.nan, right=np.nan) for curve in curves]
    )
    over_runs = values.mean(axis=0), values.min(axis=0), values.max(axis=0)
    return steps, *(np.ma.filled(value.astype(float), np.nan) for value in over_runs)


def shown_histograms(records):
    """The record of each parameterization whose histograms are drawn, if any."""
    found = [r for r in records if r["histograms"]]
    by_size = [
        [runs(found, p, s) for p in PARAMETERIZATIONS] for s in block_sizes(found)
    ]
    fullest = max(by_size, key=lambda lists: sum(map(bool, lists)), default=[])
    return {p: same[0] for p, same in zip(PARAMETERIZATIONS, fullest) if same}


def _histograms(records):
    """Means and log standard deviations by variable; None without data."""
    from matplotlib.patches import Patch

    shown = {p: r["histograms"] for p, r in shown_histograms(records).items()}
    if not shown:
        return None
    # A band of two rows for kernels, another for biases, ...
    kinds = {}
    for name in dict.fromkeys(name for h in shown.values() for name in h):
        kinds.setdefault(name.rpartition("/")[2], []).append(name)
    bands = [k[i : i + 4] for k in kinds.values() for i in range(0, len(k), 4)]
    columns = max(map(len, bands))
    figure = _figure(_WIDTH * max(1 / 2, columns / 4), 2.6 * len(bands) + 0.3)
    axes = figure.subplots(2 * len(bands), columns, squeeze=False)
    labels = {"loc": "Mean", "log_scale": "Log std. deviation"}
    for (row, column), axis in np.ndenumerate(axes):
        band, part = bands[row // 2], list(labels)[row % 2]
        if column >= len(band):
            axis.set_axis_off()
            continue
        name = band[column]
        found = {p: h[name][part] for p, h in shown.items() if name in h}
        densities = np.concatenate(
            [draw_histogram(axis, *item) for item in found.items()]
        )
        densities = densities[densities > 0]
        if len(densities):
            # Whole decades, so that there are two labels, and a single count is seen.
            decades = np.log10([densities.min() / 2, densities.max()])
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter("")
            axis.set_ylim(10 ** np.floor(decades[0]), 10 ** np.ceil(decades[1]))
        if part == "loc":
            axis.set_title(name)
        axis.set_xlabel(labels[part])
        axis.grid(False)
        if not column:
            axis.set_ylabel("Density")
    handles = [Patch(**_BARS[p], label=name) for p, name in PARAMETERIZATIONS.items()]
    _legend(figure, handles)
    return figure


def draw_histogram(axis, parameterization, histogram):
    """Returns the densities drawn."""
    edges = np.array(histogram["edges"], np.float64)
    # Edges are rounded in a record; a bin without width becomes part of the next.
    distinct = np.unique(edges)
    if len(distinct) < 2:
        return np.zeros(0)
    bins = np.minimum(np.searchsorted(distinct, edges[:-1]), len(distinct) - 2)
    counts = np.bincount(bins, histogram["counts"], minlength=len(distinct) - 1)
    density = counts / np.maximum(counts.sum(), 1) / np.diff(distinct)
    axis.stairs(density, distinct, fill=True, linewidth=0.8, **_BARS[parameterization])
    return density


def _pruning(records):
    """Accuracy against the fraction pruned; None without data."""
    from matplotlib.lines import Line2D

    titles = {
        "uniform": "Uniformly at random",
        "magnitude": "Smallest absolute value",
        "kl": "Smallest KL to zero",
    }
    if not any(r["pruning"] for r in records):
        return None
    figure = _figure(_WIDTH, 2.5)
    axes = figure.subplots(1, len(titles), sharex=True, sharey=True)
    for axis, (strategy, title) in zip(axes, titles.items()):
        for p in PARAMETERIZATIONS:
            curve = pruning_curve(records, p, strategy)
            fractions, mean, error = (100 * values for values in curve)
            if len(fractions):
                band = mean - error, mean + error
                _curve(axis, p, fractions, mean, *band, **_POINTS[p])
        axis.set_title(title)
        axis.set_xlabel("Weights set to zero (%)")
        axis.set_xlim(-4, 104)
        axis.set_ylim(0, 104)
    axes[0].set_ylabel("Test accuracy (%)")
    _legend(figure, [Line2D([], [], **_LINES[p], **_POINTS[p]) for p in _LINES])
    return figure


def captions(records: list[dict]) -> dict[str, str]:
    """What each of `FIGURES` shows, in words."""
    shown = " and ".join(
        f"{PARAMETERIZATIONS[p]} (blocks of {r['block_size']}, seed {r['seed']})"
        for p, r in shown_histograms(records).items()
    )
    pruned = ", ".join(
        f"{name}: {sum(bool(r['pruning']) for r in runs(records, p))}"
        for p, name in PARAMETERIZATIONS.items()
    )
    return {
        "dynamics": "Variational training, as the paper's Figure 2: mean (line) and "
        "range (band) over seeds of the cross-entropy of training and of the mean KL "
        "of a block. Markers: the mean number of iterations to converge, in thousands.",
        "histograms": "Posterior means and log standard deviations (natural logarithm) "
        "by variable, as the paper's Figure 1, on a logarithmic axis. The bins of runs "
        f"differ, so one run of each is shown, as in the paper: {shown}.",
        "pruning": "Accuracy of the decoded network when weights are set to zero, as "
        "the paper's Figure 3: mean (line) and standard error (band) over block sizes "
        f"and seeds. Runs: {pruned}.",
    }
