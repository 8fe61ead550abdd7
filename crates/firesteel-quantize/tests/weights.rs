//! Quantized weights of the trained model against the float model, on text that it was neither
//! trained nor calibrated on.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use firesteel_check::{TextReport, compare_text};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::{CpuModel, CpuSequence, KvFormat, SequenceOptions};
use firesteel_generate::{AddedTokens, Tokenizer};
use firesteel_quantize::weights::{
    Budget, ModelOptions, QuantizedModel, WeightBits, Widths, equalized, quantize_model,
    round_nearest,
};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

const SEQUENCE: usize = 512;
const CALIBRATION_TOKENS: usize = 8192;
const HELD_OUT_TOKENS: usize = 4096;

fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(name)
}

static MODEL: LazyLock<Checkpoint> =
    LazyLock::new(|| Checkpoint::open(&path("models/spark-tiny")).unwrap());

fn tokens(file: &str, count: usize) -> Vec<u32> {
    let tokenizer = Tokenizer::open(&path("models/spark-tiny")).unwrap();
    let text = std::fs::read_to_string(path("tests/golden/spark-tiny").join(file)).unwrap();
    let mut ids = tokenizer.encode(&text, AddedTokens::Parse).unwrap();
    ids.truncate(count);
    ids
}

fn sequence(model: &Checkpoint) -> CpuSequence {
    let model = CpuModel::new(Arc::new(model.with_weights(Vec::new()).unwrap()), Some(2)).unwrap();
    model.sequence(SequenceOptions { context: SEQUENCE, kv: KvFormat::F32 }).unwrap()
}

fn fidelity(test: &Checkpoint) -> TextReport {
    let ids = tokens("heldout.txt", HELD_OUT_TOKENS);
    compare_text(&mut sequence(&MODEL), &mut sequence(test), &ids, SEQUENCE, 0.05).unwrap()
}

fn decibels(report: &TextReport) -> f64 {
    report.logits.db.unwrap_or(f64::INFINITY)
}

fn show(name: &str, bits: f64, report: &TextReport) -> String {
    format!(
        "{name}: {bits:.3} bits, {:.2} dB, top-1 {:.2} %, KL {:.5}, {} of {} disagreements near ties",
        decibels(report),
        100.0 * report.top1,
        report.kl_mean,
        report.near_ties,
        report.disagreements,
    )
}

fn quantized(widths: Widths) -> QuantizedModel {
    let ids = tokens("calibration.txt", CALIBRATION_TOKENS);
    let options = ModelOptions { sequence: SEQUENCE, widths, measured_tokens: 512, follow: true };
    quantize_model(&MODEL, &ids, &options, &mut |_| {}).unwrap()
}

/// All matrices rounded to nearest, in the same layout.
fn plainly_rounded(bits: WeightBits) -> Checkpoint {
    let layers = MODEL.layers().iter();
    let weights = layers.flat_map(|layer| {
        [&layer.qkv, &layer.attention_out, &layer.mlp_gate, &layer.mlp_up, &layer.mlp_down]
    });
    let head = (Checkpoint::HEAD, MODEL.head_weight());
    let rounded =
        weights.map(|weight| (weight.name(), weight)).chain([head]).map(|(name, weight)| {
            let mut values = vec![0.0; weight.element_count()];
            weight.read_f32(0, &mut values).unwrap();
            let (rows, columns) = (weight.shape()[0], weight.shape()[1]);
            let matrix = round_nearest(&values, rows, columns, bits).unwrap();
            Weight::from_f32(name, vec![rows, columns], matrix.values()).unwrap()
        });
    MODEL.with_weights(rounded.collect()).unwrap()
}

#[test]
fn four_bits_are_worth_having() {
    let plain = fidelity(&plainly_rounded(WeightBits::Four));
    let four = quantized(Widths::Same(WeightBits::Four));
    let four_report = fidelity(&four.widened().unwrap());
    let mixed = quantized(Widths::Mixed(Budget::Bits(5.27)));
    let mixed_report = fidelity(&mixed.widened().unwrap());
    println!("{}", show("plain", 4.0, &plain));
    println!(
        "{}, {:.1} dB expected",
        show("4 bits", four.plan.bits, &four_report),
        four.plan.decibels
    );
    println!(
        "{}, {:.1} dB expected",
        show("mixed", mixed.plan.bits, &mixed_report),
        mixed.plan.decibels
    );
    let mut raised: Vec<_> =
        mixed.plan.widths.iter().filter(|w| *w.1 == WeightBits::Eight).collect();
    raised.sort_by_key(|w| w.0);
    println!("{raised:?}");
    assert!(decibels(&four_report) >= decibels(&plain) + 4.0);
}

#[test]
fn equalizing_changes_nothing() {
    let report = fidelity(&equalized(&MODEL).unwrap());
    println!("{}", show("equalized", 32.0, &report));
}
