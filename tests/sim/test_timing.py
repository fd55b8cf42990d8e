"""Step times: the formulas by hand, the packaged GPUs against measurements, and the files of measured tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tokenflow_sgl.sim.hardware import Hardware, Model, list_hardware, load_hardware, load_model
from tokenflow_sgl.sim.measured import Table
from tokenflow_sgl.sim.timing import Fixed, Line, Roofline, StepWork, pool_tokens

# 20 parameters in the body, 6 in the input table and 6 in the head; 8 bytes of KV a token.
TOY_MODEL = Model("toy", 1, 2, 1, 1, 2, 1, vocab=3, params=32)
TOY_GPU = Hardware("toy", 1000, 100.0, 1000.0, 1, 10.0, step_overhead_s=0.5, mfu=1.0, mbu=1.0)
TOY = Roofline(TOY_GPU, TOY_MODEL)

TABLE = Table(
    source='this machine, "measured"\n\x7f',
    decode_s=((1, 0.010), (4, 0.016), (8, 0.020)),
    decode_context_token_s=1e-6,
    prefill_fixed_s=0.005,
    prefill_token_s=1e-4,
    prefill_squared_token_s=1e-8,
    publish=Line(1e-3, 1e-7),
    kv_bytes_per_token=1536,
    store_tok_s=50_000.0,
    load_tok_s=80_000.0,
)


def decode(streams, context):
    return StepWork(decoding=streams, decode_context_tokens=streams * context)


@pytest.mark.parametrize("timing", [TOY, TABLE, Fixed(0.1, 1000.0)])
def test_no_work_takes_no_time(timing):
    assert timing.step_s(StepWork()) == 0.0
    assert timing.least_prefill_s(0) == 0.0


def test_a_decode_step_reads_all_weights_but_the_input_table_and_the_kv_of_its_contexts():
    # 26 parameters x 2 bytes / 100 = 0.52 s, above 2 x 26 FLOPs / 1000; 10 tokens x 8 bytes / 100 = 0.8 s; 0.5 s.
    assert TOY.step_s(decode(1, 10)) == pytest.approx(0.52 + 0.8 + 0.5)


def test_a_large_decode_batch_is_bound_by_its_multiplications_and_still_reads_its_kv():
    # 20 streams: 2 x 26 x 20 FLOPs / 1000 = 1.04 s, above 0.52; 20 x 10 x 8 / 100 = 16 s; 0.5 s.
    assert TOY.step_s(decode(20, 10)) == pytest.approx(1.04 + 16.0 + 0.5)


def test_a_prefill_multiplies_every_token_and_attends_to_every_pair():
    # 2 x (20 x 100 + 6) / 1000 = 4.012 s; 5,050 pairs x 4 x 1 x 1 x 2 FLOPs / 1000 = 40.4 s, above 100 x 8 / 100;
    # 0.5 s.
    assert TOY.step_s(StepWork(prefill=((100, 0),))) == pytest.approx(4.012 + 40.4 + 0.5)


def test_a_prompt_of_a_few_tokens_behind_a_long_context_reads_that_context():
    # 1 token: weights 0.52 s; 1,001 pairs x 8 / 1000 = 8.008 s, below 1,001 x 8 bytes / 100 = 80.08 s.
    assert TOY.step_s(StepWork(prefill=((1, 1000),))) == pytest.approx(0.52 + 80.08 + 0.5)


def test_chunks_of_a_prompt_cost_the_whole_and_one_more_overhead_and_head():
    whole = TOY.step_s(StepWork(prefill=((100, 0),)))
    chunks = TOY.step_s(StepWork(prefill=((50, 0),))) + TOY.step_s(StepWork(prefill=((50, 50),)))
    assert chunks == pytest.approx(whole + 0.5 + 2 * 6 / 1000)


def test_efficiency_factors_stretch_what_they_are_about_and_nothing_else():
    slow = Roofline(replace(TOY_GPU, mfu=0.5, mbu=0.25), TOY_MODEL)
    assert slow.step_s(decode(1, 10)) == pytest.approx(4 * (0.52 + 0.8) + 0.5)
    assert slow.step_s(StepWork(prefill=((100, 0),))) == pytest.approx(2 * (4.012 + 40.4) + 0.5)


def test_a_publish_walks_the_context_on_the_cpu():
    # 0.3 ms + 50,000 / 5 million = 10.3 ms.
    assert TOY.publish_s(50_000) == pytest.approx(0.0103)


def test_the_overlap_loop_publishes_while_the_gpu_is_busy_and_a_cpu_has_no_such_time():
    # LOOP_S is 4 ms: 5 ms of publishing fit into a step of 10 ms, and 8 ms make it 12 ms.
    assert TOY.pass_s(0.010, 0.005) == pytest.approx(0.010)
    assert TOY.pass_s(0.010, 0.008) == pytest.approx(0.012)
    assert TOY.pass_s(0.002, 0.0) == pytest.approx(0.002)  # without a publish nothing is added to a quick step
    assert Fixed(0.01, 1000.0).pass_s(0.010, 0.005) == pytest.approx(0.015)


@pytest.mark.parametrize("name", list_hardware())
def test_no_batch_of_prompts_is_quicker_than_the_least_each_adds(name):
    rng = random.Random(7)
    timing = Roofline(load_hardware(name), load_model("llama3-8b"))
    for _ in range(200):
        prefill = tuple((rng.randint(1, 3000), rng.randint(0, 3000)) for _ in range(rng.randint(1, 8)))
        work = StepWork(prefill, *rng.choice([(0, 0), (5, 4000), (100, 90_000)]))
        assert timing.step_s(work) >= sum(timing.least_prefill_s(new) for new, _ in prefill)


# Kernels of Llama-3-8B that others measured, in ms a step, and how far this model may be from them. Sums over the 32
# layers of qkv, o, gate_up with down, attention, then the head.
#   aiconfigurator (ai-dynamo/aiconfigurator 095f58a, GEMM and attention tables of SGLang 0.5.14, on A100 of 0.5.10) has
#   no size of gate_up and down (3 x 4,096 x 14,336 parameters): both are 2.625 times its 4,096 x 16,384. Norms,
#   rotary and sampling are not in it. The head is 1.05 GB at 80 % of the bandwidth.
#   H200:  batch 1    32 x ( 16.5 +  12.6 +  93.5 +  11.8) us = 4.30 + 0.27
#          batch 32   32 x ( 16.1 +  13.1 + 100.5 +  43.4) us = 5.54 + 0.27
#          batch 128  32 x ( 17.3 +  14.5 + 108.7 + 143.9) us = 9.10 + 0.27
#          batch 256  32 x ( 25.8 +  18.6 + 144.1 + 278.5) us = 14.9 + 0.4
#   H100:  batch 1    32 x ( 24.5 +  15.8 + 129.9 +  11.7) us = 5.82 + 0.39; vLLM served at 6.48 a token (yobitelcomm)
#          batch 128  32 x ( 21.8 +  15.8 + 162.8 + 193.8) us = 12.6 + 0.4
#          batch 256  32 x ( 24.3 +  19.3 + 165.4 + 368.7) us = 18.5 + 0.5
#   A100:  batch 1    32 x ( 35.1 +  26.6 + 252.8 +  27.0) us = 10.9 + 0.6; of batch 256 the attention kernel is a slow
#          one (31.2 of 49.4), at 80 % of the bandwidth it would take 10 less
#   LLMServingSim (casys-kaist/LLMServingSim 5daddb2, vLLM 0.19 on a 4090, all kernels; v0 on an A6000, with 2 ms of
#   norms and rotary that engines fuse) and llama.cpp F16 (XiongjieDai/GPU-Benchmarks-on-LLM-Inference aa72e0e):
#   4090:  batch 1    32 x 489.8 us + 1.13 = 16.8; llama.cpp 54.3 tok/s = 18.4
#          batch 64   32 x 875.9 us + 1.26 = 29.3;  batch 256 at 256: 32 x 1,076.5 us + 1.98 = 36.4
#   A6000: batch 1    22.1 + 1.4 = 23.5; llama.cpp 40.3 tok/s = 24.8
@pytest.mark.parametrize(
    ("gpu", "streams", "context", "measured_ms", "within"),
    [
        ("h200", 1, 1024, 4.57, 0.10),
        ("h200", 32, 1024, 5.81, 0.10),
        ("h200", 128, 1024, 9.37, 0.10),
        ("h200", 256, 1024, 15.3, 0.10),
        ("h100-80g", 1, 1024, 6.48, 0.10),
        ("h100-80g", 128, 1024, 13.0, 0.10),
        ("h100-80g", 256, 1024, 19.0, 0.10),
        ("a100-80g", 1, 1024, 11.5, 0.10),
        ("a100-80g", 256, 1024, 49.4, 0.15),
        ("rtx4090", 1, 1024, 16.8, 0.10),
        ("rtx4090", 1, 1024, 18.4, 0.10),
        ("rtx4090", 64, 1024, 29.3, 0.10),
        ("rtx4090", 256, 256, 36.4, 0.10),
        ("a6000", 1, 1024, 23.5, 0.10),
        ("a6000", 1, 1024, 24.8, 0.10),
    ],
)
def test_decode_steps_of_llama3_8b_are_near_what_was_measured(gpu, streams, context, measured_ms, within):
    found_ms = 1000 * Roofline(load_hardware(gpu), load_model("llama3-8b")).step_s(decode(streams, context))
    assert found_ms == pytest.approx(measured_ms, rel=within)


# Prefill of 2,048 tokens, ms. Low: the bare GEMMs and attention in short bursts (aiconfigurator), or all kernels of
# vLLM (4090), or the layers that vidur (microsoft/vidur 7d47513) profiled. High: vidur's layers of Llama-2-7B on an
# H100, 40.4 ms, for 8 % more parameters and with attention, 46.1; llama.cpp at 512 tokens (9,382 tok/s on the 4090).
#   H200: 32 x (134.5 + 89.2 + 909.6 + 81.1) us = 38.9    A100: 143.6 + 8.4 = 152 (vidur), aiconfigurator 125
#   4090: 193; 2,048 / 9,382 = 218                         A6000: 343 less 38 of norms that engines fuse = 305; 454
@pytest.mark.parametrize(
    ("gpu", "low_ms", "high_ms"),
    [
        ("h200", 38.9, 48.0),
        ("h100-80g", 38.9, 48.0),
        ("a100-80g", 125, 160),
        ("rtx4090", 193, 218),
        ("a6000", 305, 454),
    ],
)
def test_a_prefill_of_llama3_8b_is_between_bare_kernels_and_whole_engines(gpu, low_ms, high_ms):
    found_ms = 1000 * Roofline(load_hardware(gpu), load_model("llama3-8b")).step_s(StepWork(prefill=((2048, 0),)))
    assert low_ms < found_ms < high_ms


@pytest.mark.parametrize("gpu", ["h200", "rtx4090"])
def test_a_stream_is_slower_in_a_larger_batch_and_the_batch_is_quicker(gpu):
    timing = Roofline(load_hardware(gpu), load_model("llama3-8b"))
    times_s = [timing.step_s(decode(streams, 1024)) for streams in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert times_s == sorted(times_s)
    # From 1 to 256 streams: 256 times the tokens for less than 10 times the time.
    assert times_s[-1] < 10 * times_s[0]


@pytest.mark.parametrize(
    ("streams", "seconds"),
    [
        (1, 0.010),
        (2, 0.012),  # a third of the way from 10 to 16 ms
        (4, 0.016),
        (6, 0.018),
        (8, 0.020),
        (12, 0.024),  # 1 ms a stream, as from 4 to 8
    ],
)
def test_a_table_is_linear_between_its_points_and_beyond_the_last(streams, seconds):
    assert TABLE.step_s(StepWork(decoding=streams)) == pytest.approx(seconds)


def test_a_table_adds_the_context_that_decoding_reads():
    assert TABLE.step_s(decode(4, 500)) == pytest.approx(0.016 + 2000 * 1e-6)


def test_a_table_whose_last_points_fall_does_not_fall_further():
    falling = replace(TABLE, decode_s=((2, 0.010), (4, 0.008)))
    assert falling.step_s(StepWork(decoding=1)) == 0.010
    assert falling.step_s(StepWork(decoding=3)) == pytest.approx(0.009)
    assert falling.step_s(StepWork(decoding=100)) == 0.008


def test_a_table_of_one_point_says_the_same_of_every_batch():
    single = replace(TABLE, decode_s=((4, 0.016),))
    assert [single.step_s(StepWork(decoding=streams)) for streams in (1, 4, 9)] == [0.016] * 3


def test_chunks_of_a_prompt_add_up_to_the_whole_in_a_table_but_for_the_fixed_part():
    # 300 tokens: 5 ms + 30 ms + 0.9 ms.
    whole = TABLE.step_s(StepWork(prefill=((300, 0),)))
    assert whole == pytest.approx(0.0359)
    chunks = [TABLE.step_s(StepWork(prefill=(chunk,))) for chunk in ((100, 0), (150, 100), (50, 250))]
    assert sum(chunks) == pytest.approx(whole + 2 * 0.005)
    assert TABLE.step_s(StepWork(prefill=((100, 0), (150, 100)))) == pytest.approx(chunks[0] + chunks[1] - 0.005)


def test_a_step_of_a_table_with_prefill_and_decode_takes_both():
    work = StepWork(prefill=((300, 0),), decoding=4, decode_context_tokens=2000)
    assert TABLE.step_s(work) == pytest.approx(0.0359 + 0.018)


def test_a_table_survives_its_own_toml():
    assert Table.from_toml(TABLE.to_toml()) == TABLE


def test_a_table_is_read_from_a_file(tmp_path):
    (tmp_path / "cpu.toml").write_text(TABLE.to_toml(), encoding="utf-8")
    assert Table.load(tmp_path / "cpu.toml") == TABLE
    with pytest.raises(ValueError, match="is not a file"):
        Table.load(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("streams = [1, 4, 8]", "streams = [1, 4]", "decode.seconds: .* one number for each of the 2 in streams"),
        ("streams = [1, 4, 8]", "streams = [1, 8, 4]", r"decode.streams: \[1, 8, 4\], valid: whole numbers from 1 on"),
        ("streams = [1, 4, 8]", "streams = [0, 4, 8]", r"decode.streams: \[0, 4, 8\], valid"),
        ("streams = [1, 4, 8]", "streams = [1, 4.0, 8]", "decode.streams: .* a list of whole numbers"),
        ("seconds = [0.01,", "seconds = [0.0,", "decode.seconds of 1 streams: 0.0, valid: a number > 0"),
        ("seconds = [0.01,", "seconds = [nan,", "decode.seconds of 1 streams: nan, valid: a number > 0"),
        ("seconds = [0.01,", "seconds = ['a',", "decode.seconds: .* a list of numbers"),
        ("fixed_s = 0.005", "fixed_s = -0.005", "prefill.fixed_s: -0.005, valid: a number >= 0"),
        ("fixed_s = 0.005", "", "prefill.fixed_s: missing"),
        ("load_tok_s = 80000.0", "load_tok_s = 0", "load_tok_s: 0.0, valid: a number > 0"),
        ("kv_bytes_per_token = 1536", "kv_bytes_per_token = 1.5", "kv_bytes_per_token: 1.5, valid: a whole number"),
        ("[publish]", "[publish]\nspeed = 1", "publish.speed: 1, unknown key, valid: fixed_s, token_s"),
        ("[publish]", "[publish", "not TOML"),
    ],
)
def test_a_table_with_a_bad_number_is_refused_by_name(old, new, words):
    text = TABLE.to_toml()
    assert old in text
    with pytest.raises(ValueError, match=words):
        Table.from_toml(text.replace(old, new, 1))


def test_a_fixed_step_is_longer_only_for_more_prefill_than_fits_in_it():
    timing = Fixed(0.1, 1000.0, publish=Line(0.002, 1e-6))
    assert timing.step_s(decode(500, 9999)) == 0.1
    assert timing.step_s(StepWork(prefill=((60, 0), (40, 7)), decoding=3)) == pytest.approx(0.1)
    assert timing.step_s(StepWork(prefill=((300, 0),))) == pytest.approx(0.3)
    assert timing.publish_s(1000) == pytest.approx(0.003)
    assert timing.least_prefill_s(300) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Fixed(0.0, 1.0), "step_s of Fixed: 0.0, valid"),
        (lambda: Fixed(1.0, -1.0), "prefill_tok_s of Fixed: -1.0, valid"),
        (lambda: Line(-1.0, 0.0), "line: -1.0 s .* valid: two numbers >= 0"),
        (lambda: Line(0.0, float("nan")), "line: .* nan s a token"),
    ],
)
def test_times_below_zero_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_pool_is_what_the_fraction_leaves_beside_the_weights():
    # H200 at 0.3, as in the paper: 0.3 x 150,754,820,096 - 16,060,522,496 = 29,165,923,532.8 bytes; 222,518 x 131,072.
    assert pool_tokens(load_hardware("h200"), load_model("llama3-8b"), mem_fraction=0.3) == 222_518
    # The toy: 0.1 x 1,000 - 64 = 36 bytes: 4 tokens of 8.
    assert pool_tokens(TOY_GPU, TOY_MODEL, mem_fraction=0.1) == 4


@pytest.mark.parametrize(
    ("gpu", "model", "fraction", "words"),
    [
        # 65.5 GB of weights: at least 0.4347 of 150.8 GB, more than an A6000 has.
        ("h200", "qwen2.5-32b", 0.3, "mem_fraction: 0.3, valid: above 0.435 for qwen2.5-32b on h200"),
        ("a6000", "qwen2.5-32b", 0.9, "mem_fraction: 0.9, valid: none, the weights of qwen2.5-32b are larger"),
        ("h200", "llama3-8b", 0.0, "mem_fraction: 0.0, valid: above 0, up to 1"),
        ("h200", "llama3-8b", 1.1, "mem_fraction: 1.1, valid: above 0, up to 1"),
    ],
)
def test_a_fraction_that_leaves_no_token_is_refused_with_the_least_that_would(gpu, model, fraction, words):
    with pytest.raises(ValueError, match=words):
        pool_tokens(load_hardware(gpu), load_model(model), mem_fraction=fraction)
