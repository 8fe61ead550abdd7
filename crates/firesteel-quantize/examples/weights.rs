//! Prints how near quantized weights are to the float model: the trained model on held-out text
//! and on the tokens that llama.cpp has run, and a layer of a published shape with massive channels.
//!
//!     cargo run --release -p firesteel-quantize --example weights [-- --layer]
//!
//! With `--layer` the layer alone, which takes minutes.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that prints its table")]

#[path = "../tests/support/mod.rs"]
mod support;

use firesteel_check::TextReport;
use firesteel_checkpoint::{Checkpoint, preset};
use firesteel_quantize::weights::{
    Budget, ModelOptions, WeightBits, Widths, equalized, quantize_model,
};
use firesteel_testing::{Numbers, golden_path};
use std::sync::Arc;
use support::{
    decibels, fidelity, golden_tokens, layer_decibels, outliers, plainly_rounded, sequences,
    spark_tiny, tokens,
};

fn figures(report: &TextReport) -> String {
    format!(
        "{:7.2} dB  top-1 {:6.2} %  KL {:.5}  near ties {}/{}",
        decibels(report),
        100.0 * report.top1,
        report.kl_mean,
        report.near_ties,
        report.disagreements,
    )
}

fn main() {
    if std::env::args().any(|argument| argument == "--layer") {
        return layer();
    }
    let model = spark_tiny();
    let texts = [tokens("heldout.txt", 8192), golden_tokens()];
    let row = |name: &str, bits: &str, test: &Checkpoint| {
        let [held_out, golden] = [&texts[0], &texts[1]].map(|ids| fidelity(&model, test, ids));
        println!("{name:34} {bits:>6}  {}  | {}", figures(&held_out), figures(&golden));
    };
    println!("{:34} {:>6}  held-out text, then the tokens of llama.cpp", "weights", "bits");
    let (four, eight) = (WeightBits::Four, WeightBits::Eight);
    row("plain", "4.114", &plainly_rounded(&model, four, four));
    row("plain, head of 8 bits", "", &plainly_rounded(&model, four, eight));
    row("plain", "8.114", &plainly_rounded(&model, eight, eight));
    for name in ["q4_0", "q4_k_m"] {
        let file = golden_path(&format!("llamacpp/spark-tiny-{name}.gguf"));
        row(&format!("llama.cpp's {name} on our kernels"), "", &Checkpoint::open(&file).unwrap());
    }
    row("equalized floats", "32", &equalized(&model).unwrap());
    let ids = tokens("calibration.txt", usize::MAX);
    let (aside, ids) = ids.split_at(1024);
    let mixed = Widths::Mixed(Budget::Bits(5.27));
    let cases = [
        ("each for its inputs", Widths::Same(four), false),
        ("each for its inputs", Widths::Same(eight), false),
        ("each behind the others", Widths::Same(four), true),
        ("mixed, each for its inputs", mixed, false),
        ("mixed, each behind the others", mixed, true),
        ("30 dB, each behind the others", Widths::Mixed(Budget::Decibels(30.0)), true),
    ];
    for (name, widths, follow) in cases {
        let options = ModelOptions { widths, measured: &[aside], follow };
        let quantized = quantize_model(
            &Arc::new(equalized(&model).unwrap()),
            &sequences(ids),
            &options,
            &mut |_| {},
        )
        .unwrap();
        let bits = format!("{:.3}", quantized.plan.bits);
        row(name, &bits, &quantized.widened().unwrap());
    }
}

/// A layer of the 1.7B shape.
fn layer() {
    let model = outliers(&preset("spark-x2.5-1.7b").unwrap());
    let test = Numbers::new(2).ids(512, 2048);
    let plain = plainly_rounded(&model, WeightBits::Four, WeightBits::Four);
    println!("layer of 1.7B, output − input");
    println!("{:34} {:7.2} dB", "plain", layer_decibels(&model, &plain, &test));
    let options =
        ModelOptions { widths: Widths::Same(WeightBits::Four), measured: &[], follow: false };
    let quantized = quantize_model(
        &Arc::new(equalized(&model).unwrap()),
        &sequences(&Numbers::new(1).ids(4096, 2048)),
        &options,
        &mut |_| {},
    )
    .unwrap();
    let four = layer_decibels(&model, &quantized.widened().unwrap(), &test);
    println!("{:34} {four:7.2} dB", "each for its inputs");
}
