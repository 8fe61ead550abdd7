//! What a calibration counts, against sums made from the outputs of steps.

use crate::support::{checkpoint, options};
use firesteel_checkpoint::{Checkpoint, Slot, Weight};
use firesteel_engine::{Calibration, CheckpointEmbedding, Engine, EngineOptions};
use firesteel_step::{CacheLayoutChoice, Embedding, KvState, Logits, Role, Runner, StepSpec};
use std::collections::HashMap;
use std::sync::Arc;

const IDS: [u32; 7] = [5, 17, 3, 96, 44, 44, 9];

fn run(checkpoint: &Arc<Checkpoint>, texts: &[&[u32]]) -> Calibration {
    Calibration::run(checkpoint, texts, &mut |_| {}).unwrap()
}

/// [`IDS`] as two texts.
fn two() -> [&'static [u32]; 2] {
    [&IDS[..4], &IDS[4..]]
}

/// Mean square of each column of the RMSNorm of `rows`.
fn normed_squares(checkpoint: &Checkpoint, norm: &Weight, rows: &[f32]) -> Vec<f64> {
    let width = norm.element_count();
    let mut scale = vec![0f32; width];
    norm.read_f32(0, &mut scale).unwrap();
    let mut squares = vec![0f64; width];
    for row in rows.chunks(width) {
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        let inverse = 1.0 / (mean + checkpoint.config().rms_norm_eps).sqrt();
        for ((sum, x), scale) in squares.iter_mut().zip(row).zip(&scale) {
            *sum += (f64::from(*x) * inverse * f64::from(*scale)).powi(2);
        }
    }
    squares.iter().map(|sum| sum / (rows.len() / width) as f64).collect()
}

fn near(actual: &[f32], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        let difference = (f64::from(*actual) - expected).abs();
        assert!(difference <= 1e-5 * expected + 1e-12, "{actual} {expected}");
    }
}

#[test]
fn importance_is_the_mean_square_of_the_inputs() {
    let checkpoint = checkpoint("mini");
    let config = checkpoint.config();
    let calibration = run(&checkpoint, &[&IDS]);
    assert_eq!(calibration.tokens(), IDS.len());

    let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
    let mut x = vec![0f32; IDS.len() * config.hidden_size];
    embedding.lookup(&IDS, &mut x).unwrap();
    let first = &checkpoint.layers()[0];
    let importance = |weight: &Weight| calibration.importance(weight.name()).unwrap();
    near(
        &importance(first.weight(Slot::QueryKeyValue).unwrap()),
        &normed_squares(&checkpoint, first.weight(Slot::InputNorm).unwrap(), &x),
    );

    let whole = options(&checkpoint, IDS.len(), IDS.len(), CacheLayoutChoice::Auto);
    let spec = StepSpec::new(config, &whole).unwrap().with_logits(Logits::Hidden).unwrap();
    let engine = Engine::new(Arc::clone(&checkpoint), EngineOptions::default());
    let mut runner = engine.runner(spec.clone()).unwrap();
    let state = KvState::new(&spec).unwrap();
    let step = state.prepare(&spec, &x).unwrap();
    let outputs = runner.step(&state.inputs(&spec, &step).unwrap()).unwrap();
    let hidden = outputs.get(&spec, Role::Hidden).unwrap().view().to_f32().unwrap();
    let head = normed_squares(&checkpoint, checkpoint.final_norm(), &hidden);
    near(&importance(checkpoint.head_weight()), &head);

    for layer in checkpoint.layers() {
        assert_eq!(
            importance(layer.weight(Slot::MlpGate).unwrap()),
            importance(layer.weight(Slot::MlpUp).unwrap())
        );
        assert_eq!(
            importance(layer.weight(Slot::MlpDown).unwrap()).len(),
            config.intermediate_size
        );
        let heads = config.num_attention_heads * config.head_dim;
        assert_eq!(importance(layer.weight(Slot::AttentionOut).unwrap()).len(), heads);
        assert_eq!(calibration.importance(layer.weight(Slot::InputNorm).unwrap().name()), None);
    }
    let effects = calibration.effects(&checkpoint);
    assert_eq!(effects.len(), 5 * checkpoint.layers().len() + 1);
    assert!(effects.values().all(|effect| effect.is_finite() && *effect > 0.0));
}

#[test]
fn inputs_are_shown_in_the_order_of_the_text() {
    let checkpoint = checkpoint("mini");
    let mut squares: HashMap<String, Vec<f64>> = HashMap::new();
    let mut watch = |weight: &Weight, inputs: &[f64]| {
        let columns = weight.shape()[1];
        let sums = squares.entry(weight.name().to_owned()).or_insert_with(|| vec![0.0; columns]);
        for row in inputs.chunks_exact(columns) {
            sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * value);
        }
    };
    let calibration =
        Calibration::run_watched(&checkpoint, &two(), &mut watch, &mut |_| {}).unwrap();
    assert_eq!(squares.len(), 5 * checkpoint.layers().len() + 1);
    for (name, sums) in squares {
        let mean: Vec<f32> = sums.iter().map(|sum| (sum / IDS.len() as f64) as f32).collect();
        assert_eq!(calibration.importance(&name), Some(mean), "{name}");
    }
}

#[test]
fn layers_one_by_one_meet_what_the_whole_model_meets() {
    let checkpoint = checkpoint("mini");
    let calibration = run(&checkpoint, &two());
    let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
    let mut hidden = vec![0f32; IDS.len() * checkpoint.config().hidden_size];
    embedding.lookup(&IDS, &mut hidden).unwrap();
    for (index, layer) in checkpoint.layers().iter().enumerate() {
        let mut squares = vec![0f64; layer.weight(Slot::MlpDown).unwrap().shape()[1]];
        let mut watch = |weight: &Weight, inputs: &[f64]| {
            if weight.name() == layer.weight(Slot::MlpDown).unwrap().name() {
                for row in inputs.chunks_exact(squares.len()) {
                    squares.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * value);
                }
            }
        };
        hidden = Calibration::run_layer(&checkpoint, index, &hidden, &[4, 3], &mut watch).unwrap();
        let mean: Vec<f64> = squares.iter().map(|sum| sum / IDS.len() as f64).collect();
        near(&calibration.importance(layer.weight(Slot::MlpDown).unwrap().name()).unwrap(), &mean);
    }
    let count = checkpoint.layers().len();
    let beyond = Calibration::run_layer(&checkpoint, count, &hidden, &[4, 3], &mut |_, _| {});
    assert!(beyond.is_err());
    for (hidden, lengths) in
        [(&hidden[1..], &[4, 3][..]), (&hidden, &[4, 2]), (&hidden, &[usize::MAX, 8])]
    {
        let run = Calibration::run_layer(&checkpoint, 0, hidden, lengths, &mut |_, _| {});
        let error = run.unwrap_err().to_string();
        assert!(error.contains("values are not") && error.contains("tokens of"), "{error}");
    }
}

#[test]
fn sequences_begin_anew_and_threads_do_not_matter() {
    let checkpoint = checkpoint("mini");
    let layer = &checkpoint.layers()[0];
    let squares = |calibration: &Calibration, weight: &Weight| -> Vec<f64> {
        let mean = calibration.importance(weight.name()).unwrap();
        mean.iter().map(|mean| f64::from(*mean) * calibration.tokens() as f64).collect()
    };
    let cut = run(&checkpoint, &two());
    let parts = two().map(|text| run(&checkpoint, &[text]));
    for weight in [
        layer.weight(Slot::AttentionOut).unwrap(),
        layer.weight(Slot::MlpDown).unwrap(),
        checkpoint.head_weight(),
    ] {
        let [left, right] = [squares(&parts[0], weight), squares(&parts[1], weight)];
        let sums: Vec<f64> = left.iter().zip(&right).map(|(a, b)| a + b).collect();
        let cut: Vec<f32> = squares(&cut, weight).iter().map(|v| *v as f32).collect();
        near(&cut, &sums);
    }
    let with_threads = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let calibration = pool.install(|| run(&checkpoint, &two()));
        let mut effects: Vec<_> = calibration.effects(&checkpoint).into_iter().collect();
        effects.sort_by(|a, b| a.0.cmp(&b.0));
        (squares(&calibration, layer.weight(Slot::MlpDown).unwrap()), effects)
    };
    assert_eq!(with_threads(1), with_threads(3));
}

#[test]
fn texts_that_cannot_be_run_are_refused() {
    let checkpoint = checkpoint("mini");
    let error = |texts: &[&[u32]]| {
        Calibration::run(&checkpoint, texts, &mut |_| {}).unwrap_err().to_string()
    };
    for empty in [&[][..], &[&[][..]]] {
        assert_eq!(error(empty), "the calibration cannot be run: the texts have no tokens");
    }
    assert!(error(&[&[u32::MAX]]).contains("token id 4294967295 has no row"));
}
