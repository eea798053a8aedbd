"""Arrivals have the rate and the burstiness that they are asked for; traces are read, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler.simulate.workload import computron_gamma, gamma, power_law, read_trace


@pytest.mark.parametrize("cv", [0.25, 1.0, 4.0])
def test_gamma_arrivals_have_their_rate_and_burstiness(cv: float) -> None:
    workload = gamma({"a": 2.0, "b": 10.0}, cv, 20_000.0, seed=1)
    assert (np.diff(workload.at) >= 0).all()
    for index, rate in enumerate((2.0, 10.0)):
        gaps = np.diff(workload.at[workload.which == index])
        assert 1 / gaps.mean() == pytest.approx(rate, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(("cv", "mean", "real_cv"), [(0.25, 0.53, 0.79), (1.0, 0.68, 1.40), (4.0, 0.93, 4.0)])
def test_computrons_generator_is_flawed_as_it_was_seen_to_be(cv: float, mean: float, real_cv: float) -> None:
    gaps = np.diff(computron_gamma({"a": 1.0}, cv, 20_000.0, seed=1).at)
    assert gaps.mean() == pytest.approx(mean, abs=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(real_cv, rel=0.1)


def test_a_seed_repeats_its_arrivals_and_another_does_not() -> None:
    one, same, other = (gamma({"a": 1.0}, 1.0, 100.0, seed) for seed in (1, 1, 2))
    assert (one.at == same.at).all()
    assert not np.array_equal(one.at, other.at)


def test_popularity_by_a_power_law() -> None:
    rates = power_law(["a", "b", "c", "d"], 30.0, 0.5)
    assert sum(rates.values()) == pytest.approx(30.0)
    assert rates["a"] / rates["d"] == pytest.approx(2.0)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,prompt_tokens,output_tokens\n12.5,b,7,3\n10,a,5,2\n")
    workload = read_trace(trace)
    assert workload.at.tolist() == [0.0, 2.5]
    assert [workload.models[which] for which in workload.which] == ["a", "b"]
    assert workload.prompt.tolist() == [5, 7]
    assert workload.output.tolist() == [2, 3]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_the_azure_trace_is_spread_over_models_by_popularity(tmp_path: Path, zone: str) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02}.6805900{zone},{300 + second},4" for second in range(60)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    workload = read_trace(trace, {"a": 3.0, "b": 1.0})
    assert workload.at.tolist() == pytest.approx(range(60))
    assert workload.prompt.tolist() == list(range(300, 360))
    asked = [workload.models[which] for which in workload.which]
    assert asked.count("a") > asked.count("b") > 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a,b\n1,2\n", "has columns a, b; it needs time"),
        ("time,model,prompt_tokens,output_tokens\n1,a,many,1\n", "line 2: .*'many'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:00,1,1\n", "names no models"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_trace(trace)
