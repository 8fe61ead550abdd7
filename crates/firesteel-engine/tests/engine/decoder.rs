//! Sequences with caches of their own.

use crate::support::{checkpoint, golden_gguf, options, spark_tiny};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{
    BatchEntry, CheckpointEmbedding, CpuBatch, CpuModel, CpuOptions, CpuSequence, EngineError,
    EngineRunner, KvFormat, SequenceOptions,
};
use firesteel_kernels::Isa;
use firesteel_step::{
    BatchDecoder, BatchPart, CacheLayoutChoice, Decoder, KvState, MARKS, Role, Runner, RunnerError,
    StepError, StepSpec, Wanted,
};
use firesteel_testing::{advance, snr, values, widened};
use std::sync::Arc;

fn model(checkpoint: &Arc<Checkpoint>, isa: Isa, threads: usize) -> Arc<CpuModel> {
    let options = CpuOptions { threads: Some(threads), isa: Some(isa), ..CpuOptions::default() };
    CpuModel::with_options(Arc::clone(checkpoint), &options).unwrap()
}

fn best_model(checkpoint: &Arc<Checkpoint>) -> Arc<CpuModel> {
    CpuModel::new(Arc::clone(checkpoint), Some(2)).unwrap()
}

fn sequence(model: &Arc<CpuModel>, context: usize, kv: KvFormat) -> CpuSequence {
    model.sequence(SequenceOptions { context, kv }).unwrap()
}

/// Some ids, no two neighbours alike.
fn ids(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| 14 + (i * 37) % 1900).collect()
}

/// Logits of all of `ids` in chunks of the given sizes, again and again from the first.
fn run(sequence: &mut CpuSequence, ids: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut all, mut logits) = (Vec::new(), Vec::new());
    let mut rest = ids;
    for size in chunks.iter().cycle() {
        let (chunk, after) = rest.split_at(rest.len().min(*size));
        sequence.forward(chunk, Wanted::All, &mut logits).unwrap();
        sequence.commit(chunk.len()).unwrap();
        all.extend_from_slice(&logits);
        rest = after;
        if rest.is_empty() {
            return all;
        }
    }
    all
}

/// Logits of `ids` by a runner of the contract, token by token.
fn reference(checkpoint: &Arc<Checkpoint>, runner: &mut dyn Runner, ids: &[u32]) -> Vec<f32> {
    let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
    let spec = runner.spec().clone();
    let mut state = KvState::new(&spec).unwrap();
    let steps = ids.iter().map(|id| {
        let outputs = advance(runner, &embedding, &mut state, &[*id]);
        values(&outputs, &spec, Role::Logits)
    });
    steps.collect::<Vec<_>>().concat()
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn a_sequence_gives_the_same_bytes_however_it_is_split() {
    // The windows are 64 and 8: chunks end on every side of them and are longer than both.
    let tiny = (&[70, 64, 3][..], &[1, 5, 130][..], &[200][..]);
    let mini = (&[5, 12, 3][..], &[7, 8, 9, 1][..], &[40][..]);
    let cases = [
        (spark_tiny(), ids(200), tiny),
        (golden_gguf("q4_0"), ids(150), tiny),
        (golden_gguf("q4_k_m"), ids(150), tiny),
        (checkpoint("mini"), ids(40).iter().map(|id| id % 97).collect(), mini),
    ];
    for (checkpoint, ids, (first, second, third)) in cases {
        for isa in Isa::available() {
            let (two, one) = (model(&checkpoint, isa, 2), model(&checkpoint, isa, 1));
            for kv in KvFormat::ALL {
                if checkpoint.config().head_dim < 32 && kv == KvFormat::Q8 {
                    continue;
                }
                let name = format!("{:?} {} {kv}", checkpoint.path(), isa.name());
                let expected = run(&mut sequence(&two, ids.len(), kv), &ids, &[1]);
                // The reference kernels are slow.
                let patterns =
                    if isa.name() == "scalar" { &[second][..] } else { &[first, second, third] };
                for chunks in patterns {
                    let test = run(&mut sequence(&two, ids.len(), kv), &ids, chunks);
                    assert!(same(&expected, &test), "{name} {chunks:?}");
                }
                // With a context that is not filled, and on one thread.
                let test = run(&mut sequence(&one, 4096, kv), &ids, patterns[0]);
                assert!(same(&expected, &test), "{name}, one thread");
            }
        }
    }
}

#[test]
fn f32_caches_give_what_the_runner_of_the_contract_gives() {
    for (checkpoint, ids) in
        [(spark_tiny(), ids(150)), (checkpoint("mini"), ids(40).iter().map(|id| id % 97).collect())]
    {
        for isa in Isa::available() {
            let model = model(&checkpoint, isa, 2);
            let options = options(&checkpoint, 1, ids.len(), CacheLayoutChoice::Auto);
            let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
            let expected = reference(&checkpoint, &mut model.runner(spec).unwrap(), &ids);
            for chunks in [&[1][..], &[17, 1]] {
                let test = run(&mut sequence(&model, ids.len(), KvFormat::F32), &ids, chunks);
                // The keys are added in another order.
                let db = snr(&widened(&expected), &test);
                assert!(db >= 115.0, "{:?} {}: {db:.1} dB", checkpoint.path(), isa.name());
            }
        }
    }
}

#[test]
fn smaller_caches_stay_near_f32() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    let ids = ids(200);
    let exact = widened(&run(&mut sequence(&model, 200, KvFormat::F32), &ids, &[64]));
    for (kv, bar) in [(KvFormat::F16, 60.0), (KvFormat::Q8, 30.0)] {
        let db = snr(&exact, &run(&mut sequence(&model, 200, kv), &ids, &[64]));
        assert!(db >= bar, "{kv}: {db:.1} dB");
    }
}

#[test]
fn greedy_tokens_with_f16_caches_are_those_of_the_reference_engine() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    let best = |logits: &[f32]| {
        let of_last = &logits[logits.len() - checkpoint.config().vocab_size..];
        (0..of_last.len()).max_by(|a, b| of_last[*a].total_cmp(&of_last[*b])).unwrap() as u32
    };
    let (prompt, mut logits) = (ids(70), Vec::new());
    let mut decoder = sequence(&model, 102, KvFormat::F16);
    decoder.forward(&prompt, Wanted::Last, &mut logits).unwrap();
    decoder.commit(prompt.len()).unwrap();
    let mut generated = vec![best(&logits)];
    while generated.len() < 32 {
        decoder.forward(&generated[generated.len() - 1..], Wanted::Last, &mut logits).unwrap();
        decoder.commit(1).unwrap();
        generated.push(best(&logits));
    }
    let spec =
        StepSpec::new(checkpoint.config(), &options(&checkpoint, 1, 102, CacheLayoutChoice::Auto));
    let mut engine = EngineRunner::new(Arc::clone(&checkpoint), spec.unwrap()).unwrap();
    let all: Vec<u32> = prompt.iter().chain(&generated).copied().collect();
    let exact = reference(&checkpoint, &mut engine, &all);
    let vocabulary = checkpoint.config().vocab_size;
    let expected: Vec<u32> = exact.chunks(vocabulary).skip(69).take(32).map(best).collect();
    assert_eq!(generated, expected);
}

#[test]
fn what_is_allocated_is_what_is_said() {
    // spark-tiny has three rings and a growing cache of 2 heads of 64, and windows of 64: a ring
    // needs 63 entries and 64 for a forward, in blocks of 64. Bytes of keys and values an entry:
    let entries = [(KvFormat::F32, 1024), (KvFormat::F16, 512), (KvFormat::Q8, 272)];
    // Context, slots of a ring, entries that a mark copies of each.
    let contexts = [(1, 1, 0), (64, 64, 0), (127, 127, 0), (128, 128, 0), (129, 128, 63)];
    let tiny = spark_tiny();
    let model = best_model(&tiny);
    for (context, slots, marked) in contexts.into_iter().chain([(400, 128, 63)]) {
        for (kv, entry) in entries {
            let name = format!("{kv}, context {context}");
            let memory = SequenceOptions { context, kv }.memory(tiny.config()).unwrap();
            assert_eq!(memory.caches, entry * (3 * slots + context), "{name}");
            // Three marks of three rings.
            assert_eq!(MARKS, 3);
            assert_eq!(memory.marks, 3 * 3 * marked * entry, "{name}");
            let mut decoder = sequence(&model, context, kv);
            assert_eq!(decoder.cache_bytes(), memory.caches, "{name}");
            let (mut logits, mut marks) = (Vec::new(), 0);
            while decoder.position() < context {
                let left = context - decoder.position();
                let chunk = ids(decoder.chunk(left));
                decoder.forward(&chunk, Wanted::Nothing, &mut logits).unwrap();
                decoder.commit(chunk.len()).unwrap();
                assert_eq!(decoder.cache_bytes(), memory.caches + marks, "{name}");
                decoder.mark();
                marks = (marks + memory.marks / MARKS).min(memory.marks);
                assert_eq!(decoder.cache_bytes(), memory.caches + marks, "{name}");
            }
            assert_eq!(decoder.cache_bytes(), memory.caches + memory.marks, "{name}");
            decoder.clear();
            assert_eq!(decoder.cache_bytes(), memory.caches, "{name}");
        }
    }
    // A longer forward needs longer rings: 63 + 130 entries in blocks of 64.
    let mut decoder = sequence(&model, 400, KvFormat::F16);
    decoder.forward(&ids(130), Wanted::Nothing, &mut Vec::new()).unwrap();
    assert_eq!(decoder.cache_bytes(), 512 * (3 * 256 + 400));
    let endless = SequenceOptions { context: usize::MAX, kv: KvFormat::F16 };
    assert_eq!(endless.memory(tiny.config()), None);
    // Heads that are no whole blocks.
    let mini = checkpoint("mini");
    for (kv, fits) in [(KvFormat::F32, true), (KvFormat::F16, true), (KvFormat::Q8, false)] {
        let memory = SequenceOptions { context: 9, kv }.memory(mini.config());
        assert_eq!(memory.is_some(), fits, "{kv}");
        assert_eq!(best_model(&mini).sequence(SequenceOptions { context: 9, kv }).is_ok(), fits);
    }
}

#[test]
fn what_is_not_kept_leaves_no_trace() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    let (ids, wrong) = (ids(200), vec![3; 70]);
    for kv in KvFormat::ALL {
        let expected = run(&mut sequence(&model, 300, kv), &ids, &[1]);
        let mut decoder = sequence(&model, 300, kv);
        let (mut all, mut logits) = (Vec::new(), Vec::new());
        for (round, tokens) in [3, 1, 7, 64, 2].iter().cycle().enumerate() {
            let position = decoder.position();
            if position + tokens > ids.len() {
                break;
            }
            // Right tokens, then wrong ones, of which none or only the right ones are kept.
            let right = &ids[position..position + tokens];
            let proposal = [right, &wrong[..1 + round % 70]].concat();
            decoder.forward(&wrong, Wanted::Nothing, &mut logits).unwrap();
            assert!(logits.is_empty());
            decoder.forward(&proposal, Wanted::All, &mut logits).unwrap();
            decoder.commit(*tokens).unwrap();
            all.extend_from_slice(&logits[..tokens * checkpoint.config().vocab_size]);
            assert!(decoder.commit(1).is_err(), "the rest is forgotten");
        }
        assert!(decoder.position() > 150);
        assert!(same(&expected[..all.len()], &all), "{kv}");
    }
}

#[test]
fn sequences_go_back() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    let ids = ids(400);
    for kv in KvFormat::ALL {
        let expected = run(&mut sequence(&model, 400, kv), &ids, &[64]);
        let vocabulary = checkpoint.config().vocab_size;
        let goes_on = |decoder: &mut CpuSequence, tokens: usize, what: &str| {
            let position = decoder.position();
            let test = run(decoder, &ids[position..position + tokens], &[9]);
            let range = position * vocabulary..(position + tokens) * vocabulary;
            assert!(same(&expected[range], &test), "{kv}, {what}");
        };
        let mut decoder = sequence(&model, 400, kv);
        assert_eq!(decoder.rewind(10), 0);
        run(&mut decoder, &ids[..50], &[50]);
        // Nothing was written over yet.
        assert_eq!(decoder.rewind(60), 50);
        assert_eq!(decoder.rewind(20), 20);
        goes_on(&mut decoder, 80, "without a mark");
        decoder.mark();
        goes_on(&mut decoder, 100, "after a mark");
        // The rings have room for 65 tokens more than a window.
        assert_eq!(decoder.rewind(150), 150);
        goes_on(&mut decoder, 50, "back where the rings still reach");
        assert_eq!(decoder.rewind(130), 100);
        goes_on(&mut decoder, 150, "back at a mark");
        decoder.mark();
        goes_on(&mut decoder, 100, "after the second mark");
        decoder.mark();
        goes_on(&mut decoder, 30, "after the third mark");
        decoder.mark();
        // The fourth mark, at 380, took the place of the first, at 100.
        assert_eq!(decoder.rewind(270), 250);
        goes_on(&mut decoder, 100, "back at the second mark");
        assert_eq!(decoder.rewind(249), 0, "the first mark is gone");
        goes_on(&mut decoder, 30, "from the start");
        decoder.clear();
        assert_eq!(decoder.position(), 0);
        goes_on(&mut decoder, 30, "cleared");
    }
}

#[test]
fn a_result_does_not_depend_on_the_batch() {
    for checkpoint in [spark_tiny(), golden_gguf("q4_0")] {
        let model = best_model(&checkpoint);
        let vocabulary = checkpoint.config().vocab_size;
        let ids: Vec<u32> = ids(120);
        let start = [0, 75, 3];
        let make = || {
            start.map(|tokens| {
                let mut decoder = sequence(&model, 160, KvFormat::F16);
                if tokens > 0 {
                    run(&mut decoder, &ids[..tokens], &[64]);
                }
                decoder
            })
        };
        let (mut together, mut apart) = (make(), make());
        for wanted in [Wanted::All, Wanted::Last, Wanted::Nothing, Wanted::All] {
            let counts = [9, 1, 2];
            let mut results = vec![Vec::new(); 3];
            let mut entries: Vec<BatchEntry<'_>> = together
                .iter_mut()
                .zip(counts)
                .zip(&mut results)
                .map(|((sequence, count), logits)| {
                    let position = sequence.position();
                    let ids = &ids[position..position + count];
                    // Each wants something else.
                    let wanted = if count == 1 { Wanted::Last } else { wanted };
                    BatchEntry { sequence, ids, wanted, logits }
                })
                .collect();
            model.forward_batch(&mut entries).unwrap();
            for (((alone, batched), count), result) in
                apart.iter_mut().zip(&mut together).zip(counts).zip(&results)
            {
                let position = alone.position();
                let mut logits = Vec::new();
                alone.forward(&ids[position..position + count], Wanted::All, &mut logits).unwrap();
                let from = match wanted {
                    _ if count == 1 => 0,
                    Wanted::All => 0,
                    Wanted::Last => logits.len() - vocabulary,
                    Wanted::Nothing => logits.len(),
                };
                assert!(same(&logits[from..], result), "{wanted:?}, {count} tokens");
                alone.commit(count).unwrap();
                batched.commit(count).unwrap();
            }
        }
    }
}

/// Parts that cannot be run among some that can, which come out as alone.
#[test]
fn a_part_that_fails_changes_nothing_for_the_others() {
    let model = best_model(&spark_tiny());
    let mut batch = CpuBatch::new(Arc::clone(&model), KvFormat::F16);
    let good = [KvFormat::F32, KvFormat::Q8]
        .map(|kv| batch.add_with(SequenceOptions { context: 40, kv }).unwrap());
    let [short, gone] = [3, 40].map(|context| batch.add(context).unwrap());
    assert_eq!(batch.sequence(short).unwrap().context(), 3);
    assert!(batch.remove(gone) && !batch.remove(gone) && batch.sequence(gone).is_none());
    assert!(batch.add(0).is_err());
    let odd = batch.add(40).unwrap();
    let ids = ids(20);
    let parts: [(_, &[u32], Result<(), &str>); 7] = [
        (good[0], &ids[..9], Ok(())),
        (short, &ids[..4], Err("4 more tokens at position 0 do not fit in a context of 3")),
        (gone, &ids[..4], Err("sequence 3 is not one of the batch, or is in the same pass twice")),
        (good[0], &ids[..4], Err("is in the same pass twice")),
        (good[1], &ids[..12], Ok(())),
        (odd, &[5, 2048], Err("token id 2048 has no row")),
        (short, &[], Err("is in the same pass twice")),
    ];
    let mut logits: Vec<Vec<f32>> = vec![vec![1.0]; parts.len()];
    let mut given: Vec<BatchPart<'_>> = parts
        .iter()
        .zip(&mut logits)
        .map(|((sequence, ids, _), logits)| {
            let sequence = *sequence;
            BatchPart { sequence, ids, wanted: Wanted::Last, logits }
        })
        .collect();
    let results = batch.forward(&mut given);
    assert_eq!(results.len(), parts.len());
    for (((_, ids, expected), result), logits) in parts.iter().zip(results).zip(&logits) {
        match (expected, result) {
            (Ok(()), result) => {
                result.unwrap();
                let kv = if ids.len() == 9 { KvFormat::F32 } else { KvFormat::Q8 };
                let mut alone = Vec::new();
                sequence(&model, 40, kv).forward(ids, Wanted::Last, &mut alone).unwrap();
                assert!(same(&alone, logits));
            }
            (Err(expected), result) => {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(expected) && logits.is_empty(), "{error}");
            }
        }
    }
    for (sequence, tokens) in [(good[0], 9), (good[1], 12)] {
        batch.sequence_mut(sequence).unwrap().commit(tokens).unwrap();
    }
    assert!(batch.sequence_mut(odd).unwrap().commit(1).is_err());
    assert!(batch.forward(&mut []).is_empty());
}

#[test]
fn what_cannot_be_run_is_refused_and_changes_nothing() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    let ids = ids(20);
    let expected = run(&mut sequence(&model, 20, KvFormat::F16), &ids, &[1]);
    let mut decoder = sequence(&model, 20, KvFormat::F16);
    let mut all = run(&mut decoder, &ids[..10], &[10]);
    let mut logits = vec![1.0];
    let cases: [(&[u32], &str); 3] = [
        (&[], "number of tokens is 0, but a forward takes one or more"),
        (&[5; 11], "11 more tokens at position 10 do not fit in a context of 20"),
        (&[5, 2048], "token id 2048 has no row, 0 to 2047 are accepted"),
    ];
    for (ids, expected) in cases {
        let error = decoder.forward(ids, Wanted::Last, &mut logits).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(logits.is_empty());
        assert!(decoder.commit(1).is_err());
        assert_eq!(decoder.position(), 10);
    }
    all.extend(run(&mut decoder, &ids[10..], &[10]));
    assert!(same(&expected, &all));
    let full = decoder.forward(&[5], Wanted::Last, &mut logits);
    assert!(matches!(full, Err(RunnerError::Step(StepError::ContextFull { .. }))));

    let other = best_model(&checkpoint);
    let mut stranger = sequence(&other, 20, KvFormat::F16);
    let entry = BatchEntry {
        sequence: &mut stranger,
        ids: &[5],
        wanted: Wanted::Last,
        logits: &mut logits,
    };
    assert!(matches!(model.forward_batch(&mut [entry]), Err(EngineError::OtherModel)));
    for context in [0, 1 << 25] {
        let error = model.sequence(SequenceOptions { context, kv: KvFormat::F16 }).err().unwrap();
        assert!(error.to_string().starts_with("context is "), "{error}");
    }
    let mini = best_model(&self::checkpoint("mini"));
    let error = mini.sequence(SequenceOptions { context: 9, kv: KvFormat::Q8 }).err().unwrap();
    assert!(error.to_string().contains("head_dim of whole blocks of 32"), "{error}");
}

#[test]
fn a_filled_sequence_is_at_its_position() {
    let checkpoint = spark_tiny();
    let model = best_model(&checkpoint);
    for kv in KvFormat::ALL {
        let mut decoder = sequence(&model, 300, kv);
        decoder.fill(200).unwrap();
        assert_eq!(decoder.position(), 200);
        run(&mut decoder, &ids(100), &[30]);
        assert!(decoder.fill(301).is_err());
        // A window of 64 in three layers, and one full layer; heads of 64, two of them.
        let entry = 2 * kv.bytes(64) * 2;
        assert_eq!(decoder.bytes_seen(9), entry * 40);
        assert_eq!(decoder.bytes_seen(199), entry * (3 * 64 + 200));
    }
}
