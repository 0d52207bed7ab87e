"""Results of attune tune: what a page shows of a search. A Search is one case with one number of threads."""
import collections
import math

import plots
from results import ResultError

COLOURS = {"linked": plots.INK, "stored": "#0e7490", "sampled": "#475569", "neighbour": plots.ATTUNE}


class Search:
    def __init__(self, fields, where):
        for key in ("case", "threads", "default", "trials"):
            if key not in fields:
                raise ResultError(f"{where}: a tuned case lacks {key}; expected what tune writes with --json")
        self.case, self.threads, self.default, self.trials = fields["case"], fields["threads"], fields["default"], fields["trials"]
        self.done = fields.get("done", {})
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
    figure, panels = plots.plt.subplots(1, len(names), figsize=(1.6 * len(names) + 0.6, 2.3), squeeze=False, sharey=True, layout="constrained")
    for axes, name in zip(panels[0], names):
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
        axes.step(times, line, where="post", color=plots.ATTUNE if searcher["name"] == "attune" else plots.PEERS[index], label=searcher["name"])
    return over_time(figure, axes, "default's time / best time")
