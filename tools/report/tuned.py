"""Results of attune tune: what a page shows of a search. A Search is one case with one number of threads."""
import collections
import math

import plots
from results import require

COLOURS = {"linked": plots.INK, "stored": plots.PEERS[2], "sampled": plots.PEERS[1], "neighbour": plots.ATTUNE}
TRIAL = {"name", "strategy", "knobs", "status", "why", "origin", "short_gain", "gain", "at"}


class Search:
    def __init__(self, fields, where):
        require(fields, {"case", "threads", "default", "trials"}, f"{where}: a tuned case")
        self.case, self.threads, self.default, self.trials = fields["case"], fields["threads"], fields["default"], fields["trials"]
        for trial in self.trials:
            require(trial, TRIAL, f"{where}: a trial of {self.case}")
        self.done = fields.get("done") or {}
        if self.done:
            require(self.done, {"kernel", "gain", "seconds"}, f"{where}: the end of {self.case}")
        self.peak, self.flops = fields.get("peak_gflops"), fields.get("flops")

    @property
    def timed(self):
        return sorted((t for t in self.trials if t["gain"] > 0 and t["status"] == "right"), key=lambda t: -t["gain"])

    @property
    def failed(self):
        return [t for t in self.trials if t["status"] not in ("right", "slow")]

    @property
    def counts(self):
        return dict(collections.Counter(t["status"] for t in self.trials))

    def share(self, trial):
        """Of the machine's peak, in per cent."""
        if not (self.peak and self.flops and self.done.get("default_s")):
            return None
        return 100 * self.flops * trial["gain"] / self.done["default_s"] / (self.peak * 1e9)

    def knobs(self, trial):
        words = trial["knobs"].split()
        return dict(w.split("=", 1) for w in words) if words and all("=" in w for w in words) else {}


def shares(search):
    """The share of the peak of each candidate that ran the whole problem, best first, a colour a strategy."""
    shown = [(search.share(t), t["strategy"] or "other") for t in search.timed]
    if not shown or shown[0][0] is None:
        return ""
    figure, axes = plots.plt.subplots(figsize=(5.6, 3), layout="constrained")
    for i, strategy in enumerate(dict.fromkeys(s for _, s in shown)):
        points = [(rank, share) for rank, (share, s) in enumerate(shown, 1) if s == strategy]
        axes.plot(*zip(*points), "o", color=plots.PEERS[i % len(plots.PEERS)], markersize=4.5, label=strategy)
    default = search.share({"gain": 1.0})
    axes.axhline(default, color=plots.INK, linewidth=0.7, linestyle=":", label="default")
    axes.set_ylim(0, max(100, shown[0][0] * 1.05))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("candidates, best first")
    axes.set_ylabel("% of the peak")
    axes.legend(fontsize=7, frameon=False)
    return plots.to_svg(figure)


def searches(results):
    return [Search(fields, results.path) for fields in results.file.get("tuned", [])]


def over_time(figure, axes, what):
    """What the plots of gains over a search's seconds have in common."""
    axes.axhline(1, color=plots.INK, linewidth=0.7, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds of search")
    axes.set_ylabel(what)
    axes.legend(fontsize=7, frameon=False, loc="lower right")
    return plots.to_svg(figure)


def best_so_far(search):
    """Each candidate's gain at the time it was tried, and the best until then."""
    figure, axes = plots.plt.subplots(figsize=(5.6, 3), layout="constrained")
    timed = sorted((t for t in search.trials if (t["gain"] or t["short_gain"]) and t["status"] == "right"), key=lambda t: t["at"])
    for origin, colour in COLOURS.items():
        points = [t for t in timed if t["origin"] == origin]
        if points:
            axes.plot([t["at"] for t in points], [t["gain"] or t["short_gain"] for t in points], ".", color=colour, label=origin, markersize=5)
    whole = [t for t in timed if t["gain"]]
    best, line = 0.0, []
    for t in whole:
        best = max(best, t["gain"])
        line.append(best)
    axes.step([t["at"] for t in whole], line, where="post", color=plots.ATTUNE, linewidth=1.6)
    return over_time(figure, axes, "default's time / its time")


def sensitivity(search, strategy):
    """The gain over each knob's values, a panel a knob; empty where a strategy has too few candidates to say something."""
    trials = [(search.knobs(t), t["gain"] or t["short_gain"]) for t in search.trials if t["strategy"] == strategy and t["status"] == "right"]
    trials = [(knobs, gain) for knobs, gain in trials if knobs and gain]
    if len(trials) < 6:
        return ""
    names = list(trials[0][0])
    columns = min(4, len(names))  # as wide as a phone can show
    rows = -(-len(names) // columns)
    figure, panels = plots.plt.subplots(rows, columns, figsize=(1.5 * columns + 0.6, 2 * rows), squeeze=False, sharey=True, layout="constrained")
    for axes in panels.flat[len(names):]:
        axes.set_axis_off()
    for axes, name in zip(panels.flat, names):
        order = sorted({k.get(name, "") for k, _ in trials}, key=lambda v: (len(v), v))
        for i, value in enumerate(order):
            gains = [gain for k, gain in trials if k.get(name, "") == value]
            axes.plot([i] * len(gains), gains, ".", color="#94a3b8", markersize=4)
            axes.plot(i, max(gains), "_", color=plots.ATTUNE, markersize=11, markeredgewidth=2)
        axes.set_xticks(range(len(order)), [v.replace("+", "+\n") for v in order], fontsize=7)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(bottom=0)
    return plots.to_svg(figure)


def gain(search):
    """Of the stored result, or of the best so far."""
    if search.done:
        return search.done["gain"]
    return search.timed[0]["gain"] if search.timed else math.nan


def races(results):
    found = results.file.get("searchers", [])
    for comparison in found:
        require(comparison, {"case", "threads", "searchers"}, f"{results.path}: a comparison of searches")
        for searcher in comparison["searchers"]:
            require(searcher, {"name", "budget", "trials"}, f"{results.path}: a search of {comparison['case']}")
            for trial in searcher["trials"]:
                require(trial, {"status", "gain", "at"}, f"{results.path}: a trial of {searcher['name']}")
    return found


def race(comparison):
    """The best so far of several searches under one budget."""
    figure, axes = plots.plt.subplots(figsize=(5.6, 3), layout="constrained")
    for index, searcher in enumerate(comparison["searchers"]):
        best, times, line = 0.0, [0.0], [0.0]
        for t in sorted(searcher["trials"], key=lambda t: t["at"]):
            if t["status"] == "right" and t["gain"] > best:
                best = t["gain"]
                times.append(t["at"])
                line.append(best)
        times.append(searcher["budget"])
        line.append(best)
        axes.step(times, line, where="post", color=plots.ATTUNE if searcher["name"] == "attune" else plots.PEERS[index % len(plots.PEERS)], label=searcher["name"])
    return over_time(figure, axes, "default's time / best time")
