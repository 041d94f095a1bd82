"""Plots of timings by size; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Timing, format_bytes

# The subject is the one saturated line; the references are told apart by grey level and dash, and by their labels.
_SUBJECT: dict[str, Any] = {"color": "#c1272d", "linewidth": 2.2, "marker": "o", "zorder": 3}
_VARIANTS: dict[str, Any] = {  # of the subject
    "horon-arena": {"color": "#e2703a", "linewidth": 1.8, "marker": "^", "zorder": 3},
    "horon-op": {"color": "#8e2a5b", "linewidth": 1.8, "marker": "v", "zorder": 3},
}
_PEERS = ("#1f4e79", "#3c8d5a", "#b8860b", "#6a5acd")
_REFERENCES: dict[str, Any] = {
    "fake": {"linestyle": ":"},
    "noop": {"linestyle": (0, (1, 3))},
    "noop-work": {"linestyle": (0, (1, 5))},
    "noop-meet": {"linestyle": (0, (1, 8))},
    "memcpy": {"linestyle": "--"},
    "memcpy-all": {"linestyle": "-."},
    "pass": {"linestyle": ":"},
}


def plot_by_size(
    path: Path,
    title: str,
    timings: Sequence[Timing],
    subject: str,
    without_bandwidth: Sequence[str],
) -> None:
    """Writes latency (median, with a band up to p99) and bandwidth, both over the size, both axes logarithmic.

    Args:
        path: The image; its suffix gives the format.
        title: One line above both panels.
        timings: Every cell that was measured.
        subject: The contender to stand out.
        without_bandwidth: Contenders that move no data.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (latency, bandwidth) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    peers = iter(_PEERS)
    for contender in dict.fromkeys(timing.contender for timing in timings):
        cells = sorted((t for t in timings if t.contender == contender), key=lambda t: t.size_bytes)
        sizes = [t.size_bytes for t in cells]
        medians = [t.median_us for t in cells]
        if contender == subject:
            style: dict[str, Any] = dict(_SUBJECT)
        elif contender in _VARIANTS:
            style = dict(_VARIANTS[contender])
        elif contender in _REFERENCES:
            style = {"color": "#777777", "linewidth": 1.3, **_REFERENCES[contender]}
        else:
            style = {
                "color": next(peers, "#444444"),
                "linewidth": 1.6,
                "marker": "s",
                "markersize": 4,
            }
        latency.plot(sizes, medians, label=contender, **style)
        if contender not in _REFERENCES:
            p99s = [t.p99_us for t in cells]
            latency.fill_between(sizes, medians, p99s, color=style["color"], alpha=0.12, linewidth=0)
        if contender not in without_bandwidth:
            bandwidth.plot(sizes, [t.algbw_gb_per_s for t in cells], label=contender, **style)

    latency.set(title="Time of a call: median (shaded: up to p99)", ylabel="microseconds")
    bandwidth.set(title="Bandwidth: size / median time (algbw)", ylabel="GB/s")
    ticks = sorted({timing.size_bytes for timing in timings})
    for axes in (latency, bandwidth):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [format_bytes(size) for size in ticks], fontsize=8, rotation=30)
        axes.minorticks_off()
        axes.set_xlabel("tensor size")
        axes.grid(True, which="major", alpha=0.25)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_speeds(path: Path, title: str, speeds: Mapping[str, Mapping[str, float]]) -> None:
    """Writes bars: for each model, the speed of each variant as a part of the bare model's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(speeds), figsize=(5 * len(speeds), 3.5), layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=10)
    for axes, (model, by_variant) in zip(panels[0], speeds.items(), strict=True):
        names = list(by_variant)
        colors = [_SUBJECT["color"] if name.startswith("horon") else "#9aa5b1" for name in names]
        bars = axes.barh(names, [100 * by_variant[name] for name in names], color=colors, height=0.6)
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=9)
        axes.axvline(100, color="#444444", linewidth=0.8, linestyle=":")
        axes.set(title=model, xlabel="% of the bare model's speed without communication", xlim=(0, 118))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_cases(path: Path, title: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    """Writes bars: times of operations (logarithmic), and steps as shares of the speed without communication.

    Args:
        path: The image; its suffix gives the format.
        title: One line above both panels.
        medians: By contender and case: microseconds, or shares where the case begins with "step".
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained", width_ratios=(2, 1))
    figure.suptitle(title, fontsize=11)
    colors = dict(zip(medians, (_SUBJECT["color"], *_PEERS), strict=False))
    for panel, is_share in zip(panels, (False, True), strict=True):
        known = [case for case in next(iter(medians.values())) if not case.startswith("wait")]
        cases = [case for case in known if case.startswith("step") == is_share]
        width = 0.8 / len(medians)
        for number, (contender, found) in enumerate(medians.items()):
            heights = [100 * found[case] if is_share else found[case] for case in cases]
            places = [index + (number - (len(medians) - 1) / 2) * width for index in range(len(cases))]
            bars = panel.bar(places, heights, width, label=contender, color=colors[contender])
            panel.bar_label(bars, fmt="%.0f" if is_share else "%.3g", fontsize=8)
        panel.set_xticks(range(len(cases)), cases)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_ylabel("% of the speed without communication" if is_share else "us, median")
        if not is_share:
            panel.set_yscale("log")
    panels[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_shares(path: Path, title: str, lines: Sequence[tuple[str, float, float | None]]) -> None:
    """Writes a dot for each line, and a bar for what is best where it is known; at 1 the line is reached.

    Args:
        path: The image; its suffix gives the format.
        title: One line above the panel.
        lines: Label, share of what was asked, and the best share that anybody could have.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.17 * len(lines)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    places = range(len(lines))
    shares = [share for _, share, _ in lines]
    best = [(place, share) for place, (_, _, share) in enumerate(lines) if share is not None]
    colors = [_PEERS[1] if share >= 1 else _SUBJECT["color"] for share in shares]
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.scatter([share for _, share in best], [place for place, _ in best], marker="|", s=60, color="#777777")
    axes.scatter(shares, list(places), s=16, color=colors, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / 16, 16)
    ticks = [2.0**power for power in range(-4, 5)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("of what was asked: 1 is reached; grey: the most that was possible in this run")
    axes.set_yticks(list(places), [label for label, _, _ in lines], fontsize=6)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(True, axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
