//! Blocks in GGUF files that are not multiplied as they are stored.

use crate::support::{golden_gguf, spark_tiny};
use firesteel_checkpoint::{Checkpoint, Slot, Weight, WeightFormat};
use firesteel_engine::{CpuModel, KvFormat, SequenceOptions};
use firesteel_quantize::gguf::{GgufOptions, quantize_gguf};
use firesteel_step::{Decoder, Wanted};
use firesteel_tensor::DType;
use firesteel_testing::Numbers;
use half::f16;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const F32: WeightFormat = WeightFormat::Float(DType::F32);
const F16: WeightFormat = WeightFormat::Float(DType::F16);

fn model(checkpoint: &Arc<Checkpoint>) -> Arc<CpuModel> {
    CpuModel::new(Arc::clone(checkpoint), Some(2)).unwrap()
}

/// The bits of the logits of some tokens.
fn logits(model: &Arc<CpuModel>) -> Vec<u32> {
    let options = SequenceOptions { context: 8, kv: KvFormat::F32 };
    let mut logits = Vec::new();
    let ids = [14, 900, 31, 7, 1200];
    model.sequence(options).unwrap().forward(&ids, Wanted::All, &mut logits).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

/// Writes `checkpoint` with the formats that `of` gives its matrices, and opens it.
fn rewritten(
    checkpoint: &Checkpoint,
    path: &Path,
    of: &(dyn Fn(&str) -> Option<WeightFormat> + Sync),
) -> Arc<Checkpoint> {
    let options = GgufOptions { formats: Some(of), ..GgufOptions::new(F16) };
    quantize_gguf(checkpoint, options, path, &|_, _| {}).unwrap();
    Arc::new(Checkpoint::open(path).unwrap())
}

#[test]
fn a_head_gate_in_blocks_is_multiplied_in_floats() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["q4_0", "q8_0", "q4_k_m"] {
        let golden = golden_gguf(name);
        let gates = golden.layers().iter().map(|layer| layer.weight(Slot::HeadGate).unwrap());
        assert!(gates.clone().all(|gate| gate.format().is_quantized()), "{name}");
        let mut formats: HashMap<String, WeightFormat> = golden
            .layers()
            .iter()
            .flat_map(|layer| layer.all())
            .chain([golden.embedding()])
            .map(|weight: &Weight| (weight.name().to_owned(), weight.format()))
            .collect();
        formats.extend(gates.map(|gate| (gate.name().to_owned(), F32)));
        let path = folder.path().join(format!("{name}.gguf"));
        let floats = rewritten(&golden, &path, &|name| formats.get(name).copied());
        assert_eq!(floats.layers()[0].weight(Slot::HeadGate).unwrap().format(), F32);
        assert_eq!(
            floats.layers()[0].weight(Slot::QueryKeyValue).unwrap().format(),
            golden.layers()[0].weight(Slot::QueryKeyValue).unwrap().format()
        );
        let (golden, floats) = (model(&golden), model(&floats));
        assert!(logits(&golden) == logits(&floats), "{name}");
        assert_eq!(golden.weight_bytes(), floats.weight_bytes(), "{name}");
        assert!(golden.warnings().is_empty(), "{:?}", golden.warnings());
    }
}

/// A format without a kernel: its code in GGUF files, and one block of it.
struct Foreign {
    format: WeightFormat,
    code: u32,
    block: fn(&mut dyn FnMut() -> u8, f32) -> Vec<u8>,
}

const FOREIGN: [Foreign; 2] = [
    Foreign {
        format: WeightFormat::Q4_1,
        code: 3,
        block: |random, scale| {
            let numbers = [0.01 * scale, -0.05 * scale].map(|n| f16::from_f32(n).to_le_bytes());
            let nibbles = (0..16).map(|_| random());
            numbers.into_iter().flatten().chain(nibbles).collect()
        },
    },
    Foreign {
        format: WeightFormat::Q5K,
        code: 13,
        block: |random, scale| {
            let numbers = [1e-4 * scale, 1.5e-3 * scale].map(|n| f16::from_f32(n).to_le_bytes());
            let rest = (4..176).map(|_| random());
            numbers.into_iter().flatten().chain(rest).collect()
        },
    },
];

/// spark-tiny in f16, the matrices called `part` replaced by blocks.
fn with_blocks(path: &Path, foreign: &Foreign, part: &str, scale: f32) -> Arc<Checkpoint> {
    let tiny = rewritten(&spark_tiny(), path, &|_| None);
    let file = tiny.files()[0].bytes.clone();
    let mut bytes = file.to_vec();
    let mut numbers = Numbers::new(1);
    let mut random = || numbers.below(256) as u8;
    for (index, layer) in tiny.layers().iter().enumerate() {
        let weight = if part == "attn_qkv" {
            layer.weight(Slot::QueryKeyValue).unwrap()
        } else {
            layer.weight(Slot::MlpDown).unwrap()
        };
        let name = format!("blk.{index}.{part}.weight");
        let place = bytes.windows(name.len()).position(|found| found == name.as_bytes()).unwrap();
        // Behind the name: the number of axes, both axes, and the code of the type.
        let code = place + name.len() + 4 + 16;
        assert_eq!(bytes[code..code + 4], 1u32.to_le_bytes(), "f16");
        bytes[code..code + 4].copy_from_slice(&foreign.code.to_le_bytes());
        let mut start = weight.bytes().unwrap().as_ptr().addr() - file.as_ptr().addr();
        for _ in 0..weight.element_count() / foreign.format.block_elements() {
            let block = (foreign.block)(&mut random, scale);
            bytes[start..start + block.len()].copy_from_slice(&block);
            start += block.len();
        }
    }
    let path = path.with_extension(foreign.format.name());
    std::fs::write(&path, bytes).unwrap();
    Arc::new(Checkpoint::open(&path).unwrap())
}

#[test]
fn blocks_without_a_kernel_are_computed_with_in_f16() {
    for foreign in &FOREIGN {
        for part in ["attn_qkv", "ffn_down"] {
            let name = format!("{} {part}", foreign.format);
            let folder = tempfile::tempdir().unwrap();
            let made = with_blocks(&folder.path().join("tiny.gguf"), foreign, part, 1.0);
            let layer = &made.layers()[1];
            let weight = if part == "attn_qkv" {
                layer.weight(Slot::QueryKeyValue).unwrap()
            } else {
                layer.weight(Slot::MlpDown).unwrap()
            };
            assert_eq!(weight.format(), foreign.format, "{name}");
            let rounded = rewritten(&made, &folder.path().join("f16.gguf"), &|_| None);
            let (test, expected) = (model(&made), model(&rounded));
            assert!(logits(&test) == logits(&expected), "{name}");
            assert_eq!(test.weight_bytes(), expected.weight_bytes(), "{name}");
            let [warning] = test.warnings() else { panic!("{name}: {:?}", test.warnings()) };
            let mebibytes = |bytes: usize| format!("{:.1} MiB", 4.0 * bytes as f64 / 1048576.0);
            for part in [
                format!("4 matrices of {} (", foreign.format),
                format!("reads {} of them", mebibytes(2 * weight.element_count())),
                format!("not {};", mebibytes(weight.stored_bytes())),
            ] {
                assert!(warning.contains(&part), "{part}: {warning}");
            }
            assert!(expected.warnings().is_empty(), "{name}");
            // Half of a step of the largest block is what the blocks are wrong by; f16 is not
            // wrong by more than a 33rd of that.
            let mut values = vec![0.0; weight.element_count()];
            weight.read_f32(0, &mut values).unwrap();
            for block in values.chunks(32) {
                let mut sorted = block.to_vec();
                sorted.sort_by(f32::total_cmp);
                let steps = sorted.windows(2).map(|pair| pair[1] - pair[0]);
                let step = steps.filter(|step| *step > 1e-6).fold(f32::INFINITY, f32::min);
                let both_sides = sorted[0] < 0.0 && sorted[31] > 0.0;
                for value in block.iter().filter(|_| both_sides && step.is_finite()) {
                    let lost = (f16::from_f32(*value).to_f32() - value).abs();
                    assert!(lost <= step / 66.0 + 3.1e-8, "{name}: {value} of steps {step}");
                }
            }
        }
    }
}

#[test]
fn blocks_whose_values_do_not_fit_f16_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for foreign in &FOREIGN {
        let path = folder.path().join("tiny.gguf");
        let made = with_blocks(&path, foreign, "ffn_down", 1.2e6);
        std::fs::remove_file(path).unwrap();
        let error = CpuModel::new(Arc::clone(&made), Some(2)).err().unwrap().to_string();
        for part in ["mlp.down_proj", "too large for f16", foreign.format.name()] {
            assert!(error.contains(part), "{}: {error}", foreign.format);
        }
    }
}
