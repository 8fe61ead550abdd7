use crate::support::{all_bytes, checkpoint, golden, options};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, EngineRunner};
use firesteel_step::{CacheLayoutChoice, KvState, Role, Runner, StepSpec};
use firesteel_testing::{advance, snr, values};
use std::collections::BTreeMap;
use std::sync::Arc;

const LAYOUTS: [CacheLayoutChoice; 3] =
    [CacheLayoutChoice::Auto, CacheLayoutChoice::Ring, CacheLayoutChoice::Roll];

/// Token by token, and in chunks that start and end on every side of the window of 8.
const CHUNKS: [&[usize]; 4] = [&[1], &[5, 12, 3], &[40], &[7, 8, 9, 1]];

/// Largest difference of a log-probability among the reference's 20 likeliest tokens.
const LOG_PROBABILITY_BAR: f64 = 2.2e-5;

/// Logits of `ids` in chunks of the given sizes, again and again from the first.
fn logits(
    checkpoint: &Arc<Checkpoint>,
    ids: &[u32],
    layout: CacheLayoutChoice,
    chunks: &[usize],
) -> Vec<f32> {
    let spec =
        StepSpec::new(checkpoint.config(), &options(checkpoint, 1, ids.len(), layout)).unwrap();
    let embedding = CheckpointEmbedding::new(checkpoint.clone());
    let mut runners: BTreeMap<usize, EngineRunner> = BTreeMap::new();
    let mut cache = KvState::new(&spec).unwrap();
    let mut logits = Vec::new();
    let mut rest = ids;
    for &size in chunks.iter().cycle() {
        let size = size.min(rest.len());
        let (chunk, after) = rest.split_at(size);
        let runner = runners.entry(size).or_insert_with(|| {
            EngineRunner::new(checkpoint.clone(), spec.with_tokens(size).unwrap()).unwrap()
        });
        let outputs = advance(runner, &embedding, &mut cache, chunk);
        logits.extend(values(&outputs, runner.spec(), Role::Logits));
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    logits
}

fn log_softmax(logits: impl Iterator<Item = f64> + Clone) -> Vec<f64> {
    let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = logits.clone().map(|v| (v - largest).exp()).sum();
    logits.map(|v| v - largest - total.ln()).collect()
}

/// Largest difference over all positions.
fn top_20_difference(reference: &[f64], test: &[f32], vocabulary: usize) -> f64 {
    assert_eq!(reference.len(), test.len());
    let mut largest = 0f64;
    for (reference, test) in reference.chunks(vocabulary).zip(test.chunks(vocabulary)) {
        let reference = log_softmax(reference.iter().copied());
        let test = log_softmax(test.iter().map(|&v| f64::from(v)));
        let mut order: Vec<usize> = (0..vocabulary).collect();
        order.sort_by(|&a, &b| reference[b].total_cmp(&reference[a]));
        for &id in &order[..20] {
            let difference = (reference[id] - test[id]).abs();
            // A NaN must not pass for a small difference.
            largest = if difference <= largest { largest } else { difference };
        }
    }
    largest
}

#[test]
fn sequences_match_the_float64_forward_in_any_chunks_and_layout() {
    let golden = golden("sequence.safetensors");
    let ids = golden.ids("input_ids");
    let models = [
        ("mini", "logits_f64"),
        ("mini-untied", "logits_untied_f64"),
        ("mini-bf16-sharded", "logits_bf16_weights_f64"),
    ];
    let mut failures = Vec::new();
    for (model, reference) in models {
        let checkpoint = checkpoint(model);
        let reference = golden.f64(reference);
        for layout in LAYOUTS {
            for chunks in CHUNKS {
                let test = logits(&checkpoint, &ids, layout, chunks);
                let worst = top_20_difference(&reference, &test, checkpoint.config().vocab_size);
                if worst.is_nan() || worst > LOG_PROBABILITY_BAR {
                    failures.push(format!("{model} {layout:?} {chunks:?}: {worst:e}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "above {LOG_PROBABILITY_BAR:e}:\n{}", failures.join("\n"));
}

#[test]
fn f16_weights_are_close_to_the_f32_ones_they_were_rounded_from() {
    let golden = golden("sequence.safetensors");
    let ids = golden.ids("input_ids");
    let test = logits(&checkpoint("mini-f16"), &ids, CacheLayoutChoice::Auto, &[1]);
    let db = snr(&golden.f64("logits_f64"), &test);
    assert!((50.0..90.0).contains(&db), "{db:.1} dB");
}

#[test]
fn greedy_tokens_are_those_of_the_float64_forward() {
    let golden = golden("sequence.safetensors");
    let prompt = &golden.ids("input_ids")[..10];
    let expected = golden.ids("greedy_from_first_10");
    let checkpoint = checkpoint("mini");
    let embedding = CheckpointEmbedding::new(checkpoint.clone());
    for layout in LAYOUTS {
        let context = prompt.len() + expected.len();
        let spec =
            StepSpec::new(checkpoint.config(), &options(&checkpoint, 1, context, layout)).unwrap();
        let mut prefill =
            EngineRunner::new(checkpoint.clone(), spec.with_tokens(prompt.len()).unwrap()).unwrap();
        let mut decode = EngineRunner::new(checkpoint.clone(), spec.clone()).unwrap();
        let mut cache = KvState::new(&spec).unwrap();
        let mut outputs = advance(&mut prefill, &embedding, &mut cache, prompt);
        let mut generated = Vec::new();
        while generated.len() < expected.len() {
            let logits = values(&outputs, &spec, Role::Logits);
            let last = &logits[logits.len() - spec.vocab_size..];
            let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
            generated.push(u32::try_from(best).unwrap());
            outputs =
                advance(&mut decode, &embedding, &mut cache, &generated[generated.len() - 1..]);
        }
        assert_eq!(generated, expected, "{layout:?}");
    }
}

/// The window counts the current token: with a window of 8, token 0 is the last that position 7
/// sees and the first that position 8 does not.
#[test]
fn token_0_leaves_the_window_between_positions_7_and_8() {
    let checkpoint = checkpoint("mini");
    let config = checkpoint.config();
    assert_eq!(config.sliding_window, Some(8));
    let ids: Vec<u32> = (20..40).collect();
    let changed: Vec<u32> = std::iter::once(19).chain(21..40).collect();
    let embedding = CheckpointEmbedding::new(checkpoint.clone());
    for layout in LAYOUTS {
        for chunk in [1, 4, 5, 10, 20] {
            let options = firesteel_step::StepOptions {
                layers: 0..1,
                ..options(&checkpoint, chunk, ids.len(), layout)
            };
            let spec = StepSpec::new(config, &options).unwrap().with_layer_outputs();
            let hidden = |ids: &[u32]| -> Vec<f32> {
                let mut runner = EngineRunner::new(checkpoint.clone(), spec.clone()).unwrap();
                let mut cache = KvState::new(&spec).unwrap();
                ids.chunks(chunk)
                    .flat_map(|ids| {
                        let outputs = advance(&mut runner, &embedding, &mut cache, ids);
                        values(&outputs, &spec, Role::LayerHidden(0))
                    })
                    .collect()
            };
            let (before, after) = (hidden(&ids), hidden(&changed));
            let differs: Vec<bool> = before
                .chunks(spec.hidden_size)
                .zip(after.chunks(spec.hidden_size))
                .map(|(before, after)| before != after)
                .collect();
            let expected: Vec<bool> = (0..ids.len()).map(|position| position < 8).collect();
            assert_eq!(differs, expected, "{layout:?}, chunks of {chunk}");
        }
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let checkpoint = checkpoint("mini");
    let embedding = CheckpointEmbedding::new(checkpoint.clone());
    let ids: Vec<u32> = (3..43).collect();
    for tokens in [1, 8, 20] {
        let options = options(&checkpoint, tokens, ids.len(), CacheLayoutChoice::Auto);
        let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
        let run = || -> Vec<u8> {
            let mut runner = EngineRunner::new(checkpoint.clone(), spec.clone()).unwrap();
            let mut cache = KvState::new(&spec).unwrap();
            ids.chunks(tokens)
                .flat_map(|ids| all_bytes(&advance(&mut runner, &embedding, &mut cache, ids)))
                .collect()
        };
        let [one, two, three] = [1, 2, 3].map(|threads| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run)
        });
        assert!(one == two && one == three, "{tokens} tokens a step");
    }
}
