"""Policies in simulation: Computron's 18 settings, ours against Computron and two of least recently used.

    python -m bench.policies [--seeds 10] [--seconds 300] [--jobs 2] [--policy gswapd]

The hardware is that of Computron's paper at 2 x 2: a whole swap-in takes 0.423 s, a batch 0.057 s. Requests are single
forward passes; arrivals are gamma processes, the same for everybody. Baselines, frozen: (a) Computron's policy with its
mechanism (`bench/baselines.py`); (b) least recently used with our mechanism (tails, streaming start, free swap-out),
which shows what policy adds to mechanism. There are two of (b), told apart in the results:

- `plain` is that and no more (`bench/baselines.py`).
- `lru` is the core's own, so that it is the same here and in the daemon. It is the stronger: with it comes what the
  core does for every policy. Requests of a model that is in are served as they come, whoever runs, and what is served
  keeps its pages. It has no extent-by-extent decisions and no prefetch.

`foreseen` is no bar but a limit: ours, told when each request will come.

Bytes are page-ins. Every setting runs with one default configuration.

Figures are averages over seeds. With `--published`, (a) runs against Computron's own flawed generator for 30 s, beside
the latencies that its paper tells of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, geometric_mean

from bench.baselines import ComputronCore, PlainLruCore, foresee
from bench.report import Bar, report
from scheduler.core.config import CoreConfig
from scheduler.core.core import SchedulerCore
from scheduler.core.events import ModelSpec
from scheduler.simulate.hardware import GroupSpec, SimulatedModel
from scheduler.simulate.simulator import Core, Simulator
from scheduler.simulate.workload import Workload, computron_gamma, gamma

SWAP_IN, EXECUTE = 0.423, 0.057
MODEL_BYTES = 26_000_000_000 // 4  # of a rank
PAGES = 17  # of a model: 25 ms each
PAGE_BYTES = MODEL_BYTES // PAGES
FOREVER = 1e6

RATES = ((1, 1, 1), (10, 1, 1), (10, 10, 1), (1,) * 6, (10, 10, 1, 1, 1, 1), (10, 10, 10, 10, 1, 1))
CVS = (0.25, 1.0, 4.0)
PAPER = {  # mean latencies of the paper, in the order of CVS
    RATES[0]: (1.262, 0.606, 0.518),
    RATES[1]: (1.172, 0.886, 0.550),
    RATES[2]: (1.014, 0.716, 0.374),
    RATES[3]: (1.847, 1.282, 0.174),
    RATES[4]: (2.017, 1.413, 0.229),
    RATES[5]: (1.535, 1.470, 0.312),
}
WAIT_BOUND = 5.0
FIGURES = ("mean", "p99", "bytes")
FORESEEN = "foreseen"
BASELINES = {"a": ComputronCore, "plain": PlainLruCore}
BASES = (*BASELINES, "lru")  # what ours is held against

Results = dict["Setting", dict[str, dict[str, float]]]
"""Of each setting and who ran it: figures."""


@dataclass(frozen=True)
class Setting:
    rates: tuple[int, ...]
    cv: float

    @property
    def fit(self) -> int:
        return 2 if len(self.rates) == 3 else 4

    @property
    def batch(self) -> int:
        return 8 if len(self.rates) == 3 else 32

    @property
    def named_rates(self) -> dict[str, float]:
        return {f"model{index}": float(rate) for index, rate in enumerate(self.rates)}

    def __str__(self) -> str:
        return f"rates {','.join(map(str, self.rates))} CV {self.cv:g}"


SETTINGS = [Setting(rates, cv) for rates in RATES for cv in CVS]


def models(count: int, batch: int) -> list[SimulatedModel]:
    """Of one size, with no page in common."""
    page_seconds = SWAP_IN / PAGES
    return [
        SimulatedModel(
            ModelSpec(
                f"model{index}",
                (tuple(range(index * PAGES, (index + 1) * PAGES)),),
                page_seconds=page_seconds,
                run_seconds=EXECUTE,
            ),
            EXECUTE,
            max_batch=batch,
        )
        for index in range(count)
    ]


def group(fit: int) -> GroupSpec:
    return GroupSpec("group", PAGES * fit, PAGE_BYTES, host_rate=PAGE_BYTES * PAGES / SWAP_IN)


def core(policy: str, batch: int) -> SchedulerCore:
    return SchedulerCore(
        CoreConfig(
            page_bytes=PAGE_BYTES,
            max_queue=1 << 30,
            max_queue_total=1 << 30,
            max_running=batch,
            extent_pages=1,
            wait_bound=WAIT_BOUND,
            policy=policy,  # type: ignore[arg-type]  # checked by the configuration itself
        )
    )


def run(setting: Setting, who: str, workload: Workload) -> dict[str, float]:
    """`who`: a baseline, a policy of the core, or the limit, `FORESEEN`."""
    baseline = BASELINES.get(who)
    policy = "gswapd" if who == FORESEEN else who
    scheduler: Core = baseline(setting.fit, setting.batch) if baseline else core(policy, setting.batch)
    simulator = Simulator(
        scheduler,
        [group(setting.fit)],
        models(len(setting.rates), setting.batch),
        streaming=who != "a",
        timeout=FOREVER,
    )
    if who == FORESEEN:
        assert isinstance(scheduler, SchedulerCore)
        foresee(scheduler, workload)
    outcome = simulator.run(workload)
    summary = outcome.summary()
    assert not summary["failed"], summary["reasons"]
    figures = {name: float(summary[name]) for name in ("mean", "p50", "p99", "longest", "page_ins")}  # type: ignore[arg-type]
    return {**figures, "bytes": float(outcome.bytes_moved)}


def compare(seconds: float, whos: Sequence[str], job: tuple[Setting, int]) -> dict[str, dict[str, float]]:
    setting, seed = job
    workload = gamma(setting.named_rates, setting.cv, seconds, seed)
    return {who: run(setting, who, workload) for who in whos}


def published(job: tuple[Setting, int]) -> float:
    setting, seed = job
    return run(setting, "a", computron_gamma(setting.named_rates, setting.cv, 30.0, seed))["mean"]


def averaged(runs: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {who: {name: fmean(run[who][name] for run in runs) for name in runs[0][who]} for who in runs[0]}


def starvation(policy: str) -> float:
    """One hot model, one cold, memory for one: the longest that a request of the cold one waited."""
    longest = 0.0
    for seed in range(5):
        workload = gamma({"model0": 12.0, "model1": 0.05}, 1.0, 600.0, seed)
        simulator = Simulator(core(policy, 8), [group(1)], models(2, 8), timeout=FOREVER)
        waits = simulator.run(workload).models["model1"].first_tokens
        longest = max([longest, *(first_token - EXECUTE for first_token in waits)])
    return longest


def table(results: Results, ours: str) -> Iterator[str]:
    yield (
        f"{'mean, and ours against each':<32}"
        + "".join(f"{who:>8}" for who in (*BASES, "ours"))
        + "".join(f"{f'{name}/{base}':>12}" for base in BASES for name in FIGURES)
    )
    for setting, figures in results.items():
        means = "".join(f"{figures[who]['mean']:8.3f}" for who in (*BASES, ours))
        ratios = [figures[ours][name] / figures[base][name] for base in BASES for name in FIGURES]
        yield f"{setting!s:<32}{means}" + "".join(f"{ratio:12.2f}" for ratio in ratios)


def ratios_of(
    results: Results, who: str, name: str, base: str, where: Callable[[Setting], bool] = lambda _: True
) -> list[float]:
    """A figure of somebody's against a baseline's, setting by setting."""
    return [figures[who][name] / figures[base][name] for setting, figures in results.items() if where(setting)]


def limit(results: Results) -> Iterator[str]:
    """What foresight would make of it, against each baseline."""
    for base in BASES:
        ratios = (geometric_mean(ratios_of(results, FORESEEN, name, base)) for name in FIGURES)
        yield f"told when requests will come, ours against {base}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios)


def bars(results: Results, ours: str) -> list[Bar]:
    ratios = partial(ratios_of, results, ours)
    smooth = partial(ratios, where=lambda setting: setting.cv == 0.25)
    return [
        Bar("mean against (a), geometric mean", geometric_mean(ratios("mean", "a")), 0.44, "ratio"),
        Bar("mean against (a), worst at CV 0.25", max(smooth("mean", "a")), 0.49, "ratio"),
        Bar("mean against (a), worst", max(ratios("mean", "a")), 0.97, "ratio"),
        Bar("p99 against (a), geometric mean", geometric_mean(ratios("p99", "a")), 0.57, "ratio"),
        Bar("p99 against (a), worst", max(ratios("p99", "a")), 0.90, "ratio"),
        Bar("bytes against (a), geometric mean", geometric_mean(ratios("bytes", "a")), 0.78, "ratio"),
        Bar("bytes against (a), worst", max(ratios("bytes", "a")), 1.05, "ratio"),
        *(
            Bar(f"{name} against {label}, geometric mean", geometric_mean(ratios(name, base)), bar, "ratio")
            for label, base in (("(b), plain", "plain"), ("(b) of the core, the stronger", "lru"))
            for name, bar in zip(FIGURES, (0.78, 0.88, 0.80), strict=True)
        ),
        Bar("starvation: longest wait of the cold model", starvation(ours), WAIT_BOUND + SWAP_IN, "s"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--policy", default="gswapd")
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument("--published", action="store_true", help="(a) against the paper's own figures")
    options = parser.parse_args()
    jobs = [(setting, seed) for setting in SETTINGS if options.only in str(setting) for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        if options.published:
            means = list(pool.map(published, jobs))
            for index in range(0, len(jobs), options.seeds):
                setting = jobs[index][0]
                paper = PAPER[setting.rates][CVS.index(setting.cv)]
                print(f"{setting!s:<32}{fmean(means[index : index + options.seeds]):8.3f}  paper {paper:.3f}")
            return 0
        runs = list(pool.map(partial(compare, options.seconds, (*BASES, FORESEEN, options.policy)), jobs))
    results = {
        jobs[index][0]: averaged(runs[index : index + options.seeds]) for index in range(0, len(jobs), options.seeds)
    }
    print("\n".join(table(results, options.policy)))
    print("\n".join(limit(results)))
    figures = {str(setting): averages for setting, averages in results.items()}
    if (options.seeds, options.seconds, options.policy, options.only) != (10, 300.0, "gswapd", ""):
        for bar in bars(results, options.policy):  # a look, not a result
            print(json.dumps(bar.as_dict()))
        return 0
    details = {"seeds": options.seeds, "seconds": options.seconds, "settings": figures}
    return report("policies", bars(results, options.policy), {}, details, host="simulated")


if __name__ == "__main__":
    sys.exit(main())
