"""rankwatch / Compile: what torch.compile does for one job, which ranks compile, where they differ, what it costs the others."""

from __future__ import annotations

from . import looks, page
from .links import board, rank_of_row, rank_of_series, runbook
from .names import JOB, RATE, SMALL_RANKS, job, rank_by_rank
from .panels import About, Column, Query, bands, lines, number, rows

JOB_BOARD = board("job", "The whole job", job_id="${job_id:percentencode}")
LOW = "not at this metrics level"
NO_GRAPHS = "no CUDA graphs"
STAGES = {stage: (stage, colour) for stage, colour in looks.STAGE_COLOURS.items()}


def build() -> str:
    """The JSON text."""
    rows_ = [
        page.Row("Does it pay?", _pays()),
        page.Row("Who compiles, who waits", _who()),
        page.Row("Why again?", _why()),
        page.Row("Do the ranks agree?", _agree()),
        page.Row("CUDA graphs", _graphs()),
    ]
    text = "What torch.compile does for a job. Frames, guards and cures in full: `rankwatch compile RUN_DIR`, or /api/v1/compile of the judging launcher."
    return page.page("compile", "rankwatch / Compile", text, rows_, page.of_a_job(), page.events(JOB), since="now-1h")


def _pays() -> list[object]:
    small = {"width": 3, "height": 4}
    return [
        number(
            About(
                "Regime",
                "none",
                "What torch.compile does for this job, in one word.",
                "anything but compiled, starting and not used: `rankwatch compile` says why and what to change.",
                [runbook("recompiles"), runbook("limit")],
                no_value=LOW,
                **small,
            ),
            Query(job("max by (regime) (rankwatch_compile_regime) == 1"), "{{regime}}", now=True),
            names=looks.REGIME_COLOURS,
        ),
        number(
            About(
                "Ranks that compile now",
                "none",
                "Ranks with a thread that compiles.",
                "all of them at the start is no news; a few while the others wait is: see beside.",
                [JOB_BOARD, runbook("timeout")],
                no_value=LOW,
                **small,
            ),
            Query(job("sum(rankwatch_compile_active)"), "compile", now=True),
        ),
        number(
            About(
                "Compiles alone for",
                "s",
                "Age of the longest compile while at least one other rank does not compile.",
                "it nears the timeout of the group: raise that timeout for the first steps, or warm the caches.",
                [runbook("timeout")],
                no_value=LOW,
                decimals=0,
                **small,
            ),
            Query(job("max(rankwatch_job_compile_skew_seconds)"), "alone for", now=True),
            thresholds=looks.steps(looks.GOOD, (30, looks.WARN), (120, looks.BAD)),
        ),
        number(
            About(
                "Waited for compiles",
                "s",
                "Rank-time that ranks waited for others to compile, since the launcher started.",
                "large: share the compile cache between nodes, compile before the first collective, mark sizes dynamic.",
                [runbook("timeout")],
                no_value=LOW,
                **small,
            ),
            Query(job("max(rankwatch_compile_waited_rank_seconds_total)"), "waited", now=True),
        ),
        number(
            About(
                "Recompiles",
                "none",
                "Of the rank that has most.",
                "it still grows after the first steps: see Why again.",
                [runbook("recompiles")],
                no_value=LOW,
                decimals=0,
                **small,
            ),
            Query(job("max(rankwatch_recompiles_total)"), "recompiles", now=True),
            thresholds=looks.steps(looks.GOOD, (8, looks.WARN)),
        ),
        number(
            About(
                "Fell back to eager",
                "none",
                "Frames at the recompile limit, of the rank that has most: they run uncompiled from then on.",
                "`rankwatch compile` names frame and guard; fix the guard before raising the limit.",
                [runbook("limit")],
                no_value=LOW,
                decimals=0,
                **small,
            ),
            Query(job("max(rankwatch_recompile_limit_hits_total)"), "frames", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.BAD)),
        ),
        number(
            About(
                "Graph breaks",
                "none",
                "Of the rank that has most.",
                "in the loop's own frames they cost speed; `rankwatch compile` lists them with torch's id and the line.",
                [runbook("recompiles")],
                no_value=LOW,
                decimals=0,
                **small,
            ),
            Query(job("max(rankwatch_graph_breaks_total)"), "breaks", now=True),
        ),
        number(
            About(
                "Failed compiles",
                "none",
                "Compiles that raised, on all ranks.",
                "`rankwatch ablate` finds the layer that is to blame.",
                [runbook("failing")],
                no_value=LOW,
                decimals=0,
                **small,
            ),
            Query(job("sum(rankwatch_compile_failures_total)"), "failures", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.BAD)),
        ),
    ]


def _who() -> list[object]:
    running = job("rankwatch_compile_start_timestamp_seconds") + " > 0"
    return [
        bands(
            About(
                "Who compiles (jobs of at most 64 ranks)",
                "none",
                "A band a rank.",
                "a lone purple band while the others are grey: a lone recompile; click it.",
                [runbook("timeout")],
                [rank_of_series()],
                width=12,
                height=9,
                no_value=f"only for jobs of at most {SMALL_RANKS} ranks",
            ),
            Query(rank_by_rank("rankwatch_compile_active"), "rank {{rank}}"),
            mappings=looks.named(compiles=(1, "purple"), no=(0, looks.QUIET)),
        ),
        rows(
            About(
                "Longest running compiles",
                "none",
                "At most 20, now.",
                "click the rank; the frame and the phase are on its launcher's status page and in the incident.",
                [runbook("timeout"), JOB_BOARD],
                width=6,
                height=9,
                no_value="nothing compiles",
            ),
            [Column("Rank", "rank", links=[rank_of_row()]), Column("For", "Value", unit="s", decimals=0)],
            Query(f"topk(20, time() - max by (rank) ({running}))"),
            sort="For",
        ),
        lines(
            About(
                "Compiles alone, against the timeout",
                "s",
                "The compile that others wait for, and the smallest timeout of any group.",
                "where the lines meet the watchdog ends the job although nothing is wrong: raise the timeout for the first steps.",
                [runbook("timeout")],
                width=6,
                height=9,
            ),
            Query(job("max(rankwatch_job_compile_skew_seconds)"), "compiles alone for"),
            Query(job("min(rankwatch_collective_timeout_seconds)"), "smallest timeout"),
        ),
        lines(
            About("Ranks that compile", "none", "How many, over time.", "a wall at the start and then nothing is how it should look.", [runbook("recompiles")]),
            Query(job("sum(rankwatch_compile_active)"), "compile"),
        ),
        lines(
            About(
                "Compile time so far, by stage",
                "s",
                "Average of the ranks since they started; a stage counts once it has ended. Flat is good: nothing compiles any more.",
                "it still climbs: see Why again. Mostly inductor, triton, autotune: share the caches. dynamo, aot: fewer and smaller frames.",
                [runbook("recompiles")],
            ),
            Query(job("avg by (stage) (rankwatch_compile_seconds_total)"), "{{stage}}"),
            stacked=True,
            renamed=STAGES,
        ),
        lines(
            About(
                "Ranks that wait for compiles, on average",
                "none",
                "Rank-seconds waited a second.",
                "late in a run: some rank compiles again; see Most recompiles.",
                [runbook("timeout")],
                decimals=2,
            ),
            Query(job(f"sum(rate(rankwatch_compile_waited_rank_seconds_total{RATE}))"), "ranks waiting"),
        ),
    ]


def _why() -> list[object]:
    return [
        lines(
            About(
                "Recompiles by the guard that failed",
                "none",
                "In ten minutes, all ranks, by the kind of guard.",
                "a size: mark it dynamic. A number that counts: pass it as a tensor. The texts: `rankwatch compile`.",
                [runbook("recompiles"), runbook("limit")],
                decimals=0,
            ),
            Query(job("sum by (guard_class) (increase(rankwatch_recompiles_by_guard_total[10m]))"), "{{guard_class}}"),
            bars=True,
        ),
        rows(
            About(
                "Most recompiles",
                "none",
                "The 20 ranks with most.",
                "ranks that recompile more than their peers see other data: click one, compare.",
                [runbook("recompiles")],
                height=8,
                no_value=LOW,
            ),
            [
                Column("Rank", "rank", links=[rank_of_row()]),
                Column("Recompiles", 0, decimals=0),
                Column("Frames", 1, decimals=0),
                Column("Graph breaks", 2, decimals=0),
                Column("At the limit", 3, decimals=0, thresholds=looks.steps(looks.QUIET, (1, looks.BAD))),
            ],
            Query(f"topk(20, max by (rank) ({job('rankwatch_recompiles_total')}))"),
            Query(job("max by (rank) (rankwatch_compiled_frames_total) and topk(20, max by (rank) (rankwatch_recompiles_total))")),
            Query(job("max by (rank) (rankwatch_graph_breaks_total) and topk(20, max by (rank) (rankwatch_recompiles_total))")),
            Query(job("max by (rank) (rankwatch_recompile_limit_hits_total) and topk(20, max by (rank) (rankwatch_recompiles_total))")),
            sort="Recompiles",
        ),
        lines(
            About(
                "Compile caches",
                "none",
                "Lookups in ten minutes, all ranks, by cache and result.",
                "misses after the first run on a node: the cache is not shared, or its key changes (paths, versions, environment).",
                [runbook("timeout")],
                no_value="no lookups (only inductor has caches)",
                decimals=0,
            ),
            Query(job("sum by (cache, result) (increase(rankwatch_compile_cache_events_total[10m]))"), "{{cache}} {{result}}"),
            bars=True,
        ),
        lines(
            About(
                "Frames compiled a minute",
                "none",
                "All ranks.",
                "it does not fall to zero: something makes new frames for ever.",
                [runbook("recompiles")],
                width=12,
                height=6,
                decimals=1,
            ),
            Query(job(f"60 * sum(rate(rankwatch_compiled_frames_total{RATE}))"), "frames a minute"),
        ),
        lines(
            About(
                "Kernel configurations tried a minute",
                "none",
                "All ranks: autotuning, at run time too.",
                "late in a run: new sizes reach autotuned kernels; restrict them or keep the cache.",
                [runbook("timeout")],
                width=12,
                height=6,
                decimals=1,
            ),
            Query(job(f"60 * sum(rate(rankwatch_autotune_configs_total{RATE}))"), "configurations a minute"),
        ),
    ]


def _agree() -> list[object]:
    return [
        lines(
            About(
                "What ranks compiled differently",
                "none",
                "Frames, or DDP splits, that ranks of the same program compiled differently, by how they differ.",
                "different splits hang; different graphs may. `rankwatch compile` shows both sides.",
                [runbook("splits"), runbook("diverged")],
                decimals=0,
            ),
            Query(job("max by (kind) (rankwatch_compile_divergence)"), "{{kind}}"),
        ),
        lines(
            About(
                "Subgraphs of DDPOptimizer's split",
                "none",
                "Fewest and most of any rank, and how many different splits there are.",
                "more than one: ranks will pair different collectives. Give all the same bucket_cap_mb and model.",
                [runbook("splits")],
                no_value="no DDP split",
                decimals=0,
            ),
            Query(job("min(rankwatch_ddp_graph_splits)"), "fewest"),
            Query(job("max(rankwatch_ddp_graph_splits)"), "most"),
            Query(f'count(count by (split) (count_values("split", {job("rankwatch_ddp_graph_split_hash")})))', "different splits"),
        ),
        lines(
            About(
                "Splits that failed or did not happen",
                "none",
                "Ranks on which a split raised, and on which a DDP forward larger than a bucket was not split.",
                "not split: gradients are reduced after the whole backward. See the advice of `rankwatch compile`.",
                [runbook("splits")],
                no_value="no DDP split",
                decimals=0,
            ),
            Query(f"count({job('rankwatch_ddp_split_failures_total')} > 0) or vector(0)", "raised"),
            Query(f"count({job('rankwatch_ddp_not_split_total')} > 0) or vector(0)", "not split"),
        ),
    ]


def _graphs() -> list[object]:
    return [
        lines(
            About(
                "Recordings",
                "none",
                "In ten minutes, all ranks: CUDA graphs recorded, recorded again, and functions that were not captured.",
                "again and again: a new size or memory that has moved; `rankwatch compile` names the frame.",
                [runbook("graphs")],
                no_value=NO_GRAPHS,
                decimals=0,
            ),
            Query(job("sum(increase(rankwatch_cudagraph_recordings_total[10m]))"), "recorded"),
            Query(job("sum(increase(rankwatch_cudagraph_rerecordings_total[10m]))"), "recorded again"),
            Query(job("sum(increase(rankwatch_cudagraph_skips_total[10m]))"), "not captured"),
        ),
        lines(
            About(
                "Memory of private pools",
                "bytes",
                "The five ranks with most, and the median.",
                "it grows with the recordings: pad sizes, mark them dynamic, or limit what is captured.",
                [runbook("graphs")],
                [rank_of_series()],
                no_value=NO_GRAPHS,
            ),
            Query(f"topk(5, max by (rank) ({job('rankwatch_cudagraph_pool_bytes')}))", "rank {{rank}}"),
            Query(job("quantile(0.5, rankwatch_cudagraph_pool_bytes)"), "median"),
        ),
        lines(
            About(
                "Frames that record for every new size",
                "none",
                "And new sizes still come.",
                "`rankwatch compile` names them; pad, or mark the size dynamic.",
                [runbook("graphs")],
                no_value=NO_GRAPHS,
                decimals=0,
            ),
            Query(job("max(rankwatch_cudagraph_growing_frames)"), "frames"),
        ),
    ]
