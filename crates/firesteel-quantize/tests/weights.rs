//! Quantized weights against the float model, on text that it was neither trained nor calibrated
//! on.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod support;

use firesteel_check::TextReport;
use firesteel_checkpoint::{Checkpoint, Head, Weight};
use firesteel_quantize::weights::{
    Budget, LayerOptions, ModelOptions, QuantizedMatrix, WeightBits, WeightError, Widths,
    equalized, quantize_model, round_layers,
};
use firesteel_testing::Numbers;
use std::sync::{Arc, LazyLock};
use support::{
    decibels, fidelity, layer_decibels, outliers, plainly_rounded, sequences, spark_tiny, tokens,
};

static MODEL: LazyLock<Checkpoint> = LazyLock::new(spark_tiny);

static EQUAL: LazyLock<Arc<Checkpoint>> = LazyLock::new(|| Arc::new(equalized(&MODEL).unwrap()));

fn options(widths: Widths) -> ModelOptions<'static> {
    ModelOptions { widths, measured: &[], follow: false }
}

fn on_held_out_text(test: &Checkpoint) -> TextReport {
    fidelity(&MODEL, test, &tokens("heldout.txt", 2048))
}

#[test]
fn four_bits_are_worth_having() {
    let calibration = tokens("calibration.txt", 2048);
    let plain = plainly_rounded(&MODEL, WeightBits::Four, WeightBits::Four);
    let plain = decibels(&on_held_out_text(&plain));
    let mut seen = Vec::new();
    let mut progress = |name: &str| seen.push(name.to_owned());
    let options = options(Widths::Same(WeightBits::Four));
    let model = quantize_model(&EQUAL, &sequences(&calibration), &options, &mut progress).unwrap();
    assert_eq!(seen.len(), 5 * MODEL.layers().len() + 1);
    assert_eq!(seen.len(), model.matrices.len());
    assert!(model.matrices.values().all(|matrix| matrix.bits == WeightBits::Four));
    let report = on_held_out_text(&model.widened().unwrap());
    let four = decibels(&report);
    assert!(four >= 20.0 && four >= plain + 6.0, "{plain:.2} dB, {four:.2} dB, {report:?}");
}

#[test]
fn a_third_of_the_matrices_in_eight_bits_reaches_the_block_formats() {
    let calibration = tokens("calibration.txt", 6144 + 1024);
    let (calibration, aside) = calibration.split_at(6144);
    let widths = Widths::Mixed(Budget::Bits(5.27));
    let options = ModelOptions { widths, measured: &[aside], follow: true };
    let model = quantize_model(&EQUAL, &sequences(calibration), &options, &mut |_| {}).unwrap();
    let weights = |matrix: &QuantizedMatrix| (matrix.rows * matrix.columns) as f64;
    let stored = |matrix: &QuantizedMatrix| {
        weights(matrix) * f64::from(matrix.bits.count()) + 32.0 * matrix.rows as f64
    };
    let all: f64 = model.matrices.values().map(weights).sum();
    let bits = model.matrices.values().map(stored).sum::<f64>() / all;
    assert!(bits <= 5.27 && (bits - model.plan.bits).abs() < 1e-9, "{bits}");
    let report = on_held_out_text(&model.widened().unwrap());
    let mixed = decibels(&report);
    assert_eq!((model.expected, model.measured), (None, None));
    let good = mixed >= 24.4 && report.kl_mean <= 0.0150 && report.top1 >= 0.90;
    assert!(good, "{mixed:.2} dB, {report:?}");
}

#[test]
fn texts_that_are_set_aside_are_rounded_for_when_nothing_more_is_measured() {
    let ids = tokens("calibration.txt", 512 + 64);
    let (calibration, aside) = ids.split_at(512);
    let every = LayerOptions { layers: 0..MODEL.layers().len(), head: true, follow: true };
    let cases = [
        (Budget::Bits(5.27), vec![calibration, aside]),
        (Budget::Decibels(18.0), vec![calibration]),
    ];
    for (budget, texts) in cases {
        let options =
            ModelOptions { widths: Widths::Mixed(budget), measured: &[aside], follow: true };
        let model = quantize_model(&EQUAL, &[calibration], &options, &mut |_| {}).unwrap();
        assert_eq!(model.measured.is_some(), matches!(budget, Budget::Decibels(_)));
        let width = |name: &str| model.plan.widths[name];
        let alone = round_layers(&EQUAL, &texts, &every, &width, &mut |_| {}).unwrap();
        assert!(model.matrices == alone, "{budget:?}");
    }
}

#[test]
fn eight_bits_lose_almost_nothing() {
    let calibration = tokens("calibration.txt", 1024);
    let options = options(Widths::Same(WeightBits::Eight));
    let model = quantize_model(&EQUAL, &sequences(&calibration), &options, &mut |_| {}).unwrap();
    let plain = plainly_rounded(&MODEL, WeightBits::Eight, WeightBits::Eight);
    let plain = decibels(&on_held_out_text(&plain));
    let eight = decibels(&on_held_out_text(&model.widened().unwrap()));
    assert!(eight >= 43.0 && eight >= plain + 4.0, "{plain:.2} dB, {eight:.2} dB");
}

#[test]
fn massive_channels_do_no_more_harm_than_others() {
    let model = outliers(MODEL.config());
    let plain = plainly_rounded(&model, WeightBits::Four, WeightBits::Four);
    let options = options(Widths::Same(WeightBits::Four));
    let quantized = quantize_model(
        &Arc::new(equalized(&model).unwrap()),
        &sequences(&Numbers::new(1).ids(2048, 2048)),
        &options,
        &mut |_| {},
    )
    .unwrap();
    let ids = Numbers::new(2).ids(512, 2048);
    let plain = layer_decibels(&model, &plain, &ids);
    let four = layer_decibels(&model, &quantized.widened().unwrap(), &ids);
    assert!(four >= plain + 5.0, "{plain:.2} dB, {four:.2} dB");
}

#[test]
fn equalizing_changes_nothing_but_the_weights() {
    let model = equalized(&MODEL).unwrap();
    let report = on_held_out_text(&model);
    // The kernels' own rounding in f32 is in it.
    assert!(decibels(&report) >= 125.0 && report.disagreements == 0, "{report:?}");
    assert!(matches!(model.head(), Head::Stored(_)));
    let values = |weight: &Weight| {
        let mut values = vec![0f32; weight.element_count()];
        weight.read_f32(0, &mut values).unwrap();
        values
    };
    assert_eq!(values(model.embedding()), values(MODEL.embedding()));
    // Each row relative to its own size, the columns of the head are equally large.
    let head = values(model.head_weight());
    let width = model.config().hidden_size;
    let mut sums = vec![0f64; width];
    for (row, old) in head.chunks(width).zip(values(MODEL.head_weight()).chunks(width)) {
        let square: f32 = old.iter().map(|w| w * w).sum();
        sums.iter_mut().zip(row).for_each(|(sum, w)| *sum += f64::from(w * w / square));
    }
    let mean = sums.iter().sum::<f64>() / width as f64;
    assert!(sums.iter().all(|sum| (sum / mean - 1.0).abs() < 1e-3));
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let calibration = tokens("calibration.txt", 64);
    let error = |ids: &[u32], widths| {
        quantize_model(&EQUAL, &sequences(ids), &options(widths), &mut |_| {}).unwrap_err()
    };
    let four = Widths::Same(WeightBits::Four);
    assert!(matches!(error(&[], four), WeightError::Engine(_)));
    assert!(matches!(error(&[u32::MAX], four), WeightError::Runner(_)));
    let few = error(&calibration, Widths::Mixed(Budget::Bits(4.0)));
    assert_eq!(
        few.to_string(),
        "4 bits for each weight cannot be met: with 4 bits everywhere it is 4.114"
    );
}
