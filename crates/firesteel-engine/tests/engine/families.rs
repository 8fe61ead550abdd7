//! Other families than the one of the remaining tests, against float64 forwards of their definition.

use crate::support::{all_bytes, options};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel, EngineRunner, KvFormat, SequenceOptions};
use firesteel_step::{CacheLayoutChoice, Decoder, KvState, Role, Runner, StepSpec, Wanted};
use firesteel_testing::{Golden, advance, golden_path, snr, values};
use std::collections::BTreeMap;
use std::sync::Arc;

const MODELS: [&str; 2] = ["tied", "untied"];
const CHUNKS: [&[usize]; 4] = [&[1], &[5, 12, 3], &[48], &[7, 8, 9, 1]];
/// Tokens before the greedy ones.
const PROMPT: usize = 16;

fn model(name: &str) -> (Arc<Checkpoint>, Golden) {
    let checkpoint = Checkpoint::open(&golden_path("qwen3").join(name)).unwrap();
    (Arc::new(checkpoint), Golden::open(&golden_path(&format!("qwen3/{name}.safetensors"))))
}

/// Runs `ids` in chunks of the given sizes, again and again from the first; shows `see` the outputs.
fn run(
    spec: &StepSpec,
    checkpoint: &Arc<Checkpoint>,
    make: &dyn Fn(StepSpec) -> Box<dyn Runner>,
    (ids, chunks): (&[u32], &[usize]),
    see: &mut dyn FnMut(&StepSpec, &firesteel_step::StepOutputs),
) {
    let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
    let mut runners: BTreeMap<usize, Box<dyn Runner>> = BTreeMap::new();
    let mut cache = KvState::new(spec).unwrap();
    let mut rest = ids;
    for &size in chunks.iter().cycle() {
        let (chunk, after) = rest.split_at(size.min(rest.len()));
        let runner = runners
            .entry(chunk.len())
            .or_insert_with(|| make(spec.with_tokens(chunk.len()).unwrap()));
        let outputs = advance(runner.as_mut(), &embedding, &mut cache, chunk);
        see(runner.spec(), &outputs);
        rest = after;
        if rest.is_empty() {
            return;
        }
    }
}

#[test]
fn logits_and_layers_match_the_float64_forward_in_any_chunks() {
    let mut failures = Vec::new();
    for name in MODELS {
        let (checkpoint, golden) = model(name);
        let (ids, reference) = (golden.ids("ids"), golden.f64("logits"));
        let cpu = CpuModel::new(Arc::clone(&checkpoint), Some(2)).unwrap();
        let options = options(&checkpoint, 1, ids.len(), CacheLayoutChoice::Auto);
        let spec = StepSpec::new(checkpoint.config(), &options).unwrap().with_layer_outputs();
        let engine = |spec| -> Box<dyn Runner> {
            Box::new(EngineRunner::new(Arc::clone(&checkpoint), spec).unwrap())
        };
        let kernels = |spec| -> Box<dyn Runner> { Box::new(cpu.runner(spec).unwrap()) };
        type Make<'a> = &'a dyn Fn(StepSpec) -> Box<dyn Runner>;
        let kinds: [(&str, Make<'_>, f64); 2] =
            [("engine", &engine, 140.0), ("cpu", &kernels, 110.0)];
        for (kind, make, bar) in kinds {
            for chunks in CHUNKS {
                let last = checkpoint.config().num_layers() - 1;
                let mut logits = Vec::new();
                let mut hidden = vec![Vec::new(); last];
                run(&spec, &checkpoint, make, (&ids, chunks), &mut |spec, outputs| {
                    logits.extend(values(outputs, spec, Role::Logits));
                    for (layer, hidden) in hidden.iter_mut().enumerate() {
                        hidden.extend(values(outputs, spec, Role::LayerHidden(layer)));
                    }
                });
                let mut check = |what: String, reference: &[f64], test: &[f32]| {
                    let db = snr(reference, test);
                    if db.is_nan() || db < bar {
                        failures.push(format!("{name} {kind} {chunks:?} {what}: {db:.1} dB"));
                    }
                };
                check("logits".into(), &reference, &logits);
                for (layer, hidden) in hidden.iter().enumerate() {
                    let name = format!("hidden_{layer}");
                    check(name.clone(), &golden.f64(&name), hidden);
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn greedy_tokens_are_those_of_the_float64_forward() {
    for name in MODELS {
        let (checkpoint, golden) = model(name);
        let (prompt, expected) = (&golden.ids("ids")[..PROMPT], golden.ids("greedy"));
        let best = |logits: &[f32]| -> u32 {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            u32::try_from(best.unwrap()).unwrap()
        };
        // On the kernels, with caches of their own.
        let cpu = CpuModel::new(Arc::clone(&checkpoint), Some(2)).unwrap();
        for chunk in [1, 5, PROMPT] {
            let options = SequenceOptions { context: 64, kv: KvFormat::F32 };
            let mut sequence = cpu.sequence(options).unwrap();
            let mut logits = Vec::new();
            for ids in prompt.chunks(chunk) {
                sequence.forward(ids, Wanted::Last, &mut logits).unwrap();
                sequence.commit(ids.len()).unwrap();
            }
            let mut generated = Vec::new();
            while generated.len() < expected.len() {
                let next = best(&logits);
                generated.push(next);
                sequence.forward(&[next], Wanted::Last, &mut logits).unwrap();
                sequence.commit(1).unwrap();
            }
            assert_eq!(generated, expected, "{name}, chunks of {chunk}");
        }
        // In float64.
        let options = options(&checkpoint, 1, 64, CacheLayoutChoice::Auto);
        let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
        let mut runner = EngineRunner::new(Arc::clone(&checkpoint), spec.clone()).unwrap();
        let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
        let mut cache = KvState::new(&spec).unwrap();
        let mut ids = prompt.to_vec();
        let mut logits = Vec::new();
        for position in 0..PROMPT + expected.len() {
            if position == ids.len() {
                ids.push(best(&logits));
            }
            let outputs = advance(&mut runner, &embedding, &mut cache, &ids[position..=position]);
            logits = values(&outputs, &spec, Role::Logits);
        }
        assert_eq!(ids[PROMPT..], expected, "{name}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (checkpoint, golden) = model("untied");
    let ids = golden.ids("ids");
    let bytes = |threads| {
        let cpu = CpuModel::new(Arc::clone(&checkpoint), Some(threads)).unwrap();
        let options = options(&checkpoint, 1, ids.len(), CacheLayoutChoice::Auto);
        let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
        let mut all = Vec::new();
        let make = |spec| -> Box<dyn Runner> { Box::new(cpu.runner(spec).unwrap()) };
        run(&spec, &checkpoint, &make, (&ids, &[7, 20]), &mut |_, outputs| {
            all.extend(all_bytes(outputs));
        });
        all
    };
    assert!(bytes(1) == bytes(2) && bytes(1) == bytes(3));
}
