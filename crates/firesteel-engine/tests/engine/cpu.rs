//! The CPU's kernels against the reference engine.

use crate::support::{checkpoint, golden, options, spark_tiny};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel, CpuOptions, EngineError, EngineRunner};
use firesteel_kernels::Isa;
use firesteel_step::{CacheLayoutChoice, KvState, Role, Runner, StepInputs, StepOptions, StepSpec};
use firesteel_tensor::{DType, Tensor};
use firesteel_testing::{advance, snr, values, widened};
use std::sync::Arc;

/// Logits of `ids` in the given chunks.
fn logits(
    make: &dyn Fn(StepSpec) -> Box<dyn Runner>,
    checkpoint: &Arc<Checkpoint>,
    ids: &[u32],
    chunks: &[usize],
    layout: CacheLayoutChoice,
) -> Vec<f32> {
    let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
    let spec = |tokens| {
        let options = options(checkpoint, tokens, ids.len(), layout);
        StepSpec::new(checkpoint.config(), &options).unwrap()
    };
    let mut state = KvState::new(&spec(1)).unwrap();
    let mut all = Vec::new();
    let mut sizes = chunks.iter().cycle();
    while state.position() < ids.len() {
        let left = ids.len() - state.position();
        let size = sizes.next().copied().filter(|size| *size <= left).unwrap_or(1);
        let spec = spec(size);
        let mut runner = make(spec.clone());
        let start = state.position();
        let outputs = advance(runner.as_mut(), &embedding, &mut state, &ids[start..start + size]);
        all.extend(values(&outputs, &spec, Role::Logits));
    }
    all
}

#[test]
fn kernels_compute_what_the_reference_engine_computes() {
    let tiny = spark_tiny();
    let long: Vec<u32> = (0..150).map(|i| 14 + (i * 37) % 1900).collect();
    let short = golden("sequence.safetensors").ids("input_ids");
    let cases = [
        (tiny, long, &[&[1][..], &[70, 64, 3]][..]),
        (checkpoint("mini"), short.clone(), &[&[1], &[5, 12, 3]]),
        (checkpoint("mini-f16"), short.clone(), &[&[1], &[7, 8, 9]]),
        (checkpoint("mini-bf16-sharded"), short, &[&[1], &[40]]),
    ];
    for (checkpoint, ids, patterns) in cases {
        let engine = |spec| {
            Box::new(EngineRunner::new(checkpoint.clone(), spec).unwrap()) as Box<dyn Runner>
        };
        for layout in [CacheLayoutChoice::Auto, CacheLayoutChoice::Roll] {
            let reference = widened(&logits(&engine, &checkpoint, &ids, &[1], layout));
            for isa in Isa::available() {
                let options =
                    CpuOptions { threads: Some(2), isa: Some(isa), ..CpuOptions::default() };
                let model = CpuModel::with_options(checkpoint.clone(), &options).unwrap();
                let cpu = |spec| Box::new(model.runner(spec).unwrap()) as Box<dyn Runner>;
                for chunks in patterns {
                    let test = logits(&cpu, &checkpoint, &ids, chunks, layout);
                    let db = snr(&reference, &test);
                    let name = format!("{:?} {} {layout:?}", checkpoint.path(), isa.name());
                    assert!(db >= 105.0, "{name} {chunks:?}: {db:.1} dB");
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_byte() {
    let checkpoint = checkpoint("mini");
    let ids = golden("sequence.safetensors").ids("input_ids");
    let run = |threads| {
        let model = CpuModel::new(checkpoint.clone(), Some(threads)).unwrap();
        let cpu = |spec| Box::new(model.runner(spec).unwrap()) as Box<dyn Runner>;
        logits(&cpu, &checkpoint, &ids, &[12, 1, 3], CacheLayoutChoice::Auto)
    };
    let one = run(1);
    for threads in [2, 3] {
        assert!(run(threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn masks_that_are_not_causal_are_refused() {
    let checkpoint = checkpoint("mini");
    let spec = StepSpec::new(
        checkpoint.config(),
        &StepOptions { dtype: DType::F32, ..options(&checkpoint, 3, 20, CacheLayoutChoice::Auto) },
    )
    .unwrap();
    let model = CpuModel::new(checkpoint.clone(), Some(1)).unwrap();
    let mut runner = model.runner(spec.clone()).unwrap();
    let state = KvState::new(&spec).unwrap();
    let step = state.prepare(&spec, &vec![0.1; 3 * spec.hidden_size]).unwrap();
    let inputs = state.inputs(&spec, &step).unwrap();
    assert!(runner.step(&inputs).is_ok());
    // A token that sees the one after it, one that is dampened, and one that sees the cache late.
    for (index, value) in [(7 + 1, 0.0), (7, -0.5), (10, 0.0)] {
        let tensors: Vec<Tensor> = spec
            .inputs
            .iter()
            .zip(inputs.tensors())
            .map(|(input, tensor)| {
                if input.name != "mask_sw" {
                    return tensor.to_tensor();
                }
                let mut mask = tensor.to_f32().unwrap().into_owned();
                mask[index] = value;
                Tensor::from_f32(input.shape.clone(), mask).unwrap()
            })
            .collect();
        let inputs = StepInputs::new(&spec, tensors.iter().map(Tensor::view).collect()).unwrap();
        let error = runner.step(&inputs).unwrap_err().to_string();
        assert!(error.contains("what a causal mask does not"), "{index}: {error}");
    }
    let other = self::checkpoint("mini-untied");
    let small = StepSpec { vocab_size: 96, ..spec };
    assert!(matches!(
        CpuModel::new(other, None).unwrap().runner(small),
        Err(EngineError::Mismatch { .. })
    ));
}
