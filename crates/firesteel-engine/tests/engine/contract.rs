use crate::support::{checkpoint, options};
use firesteel_checkpoint::LayerKind;
use firesteel_engine::{CheckpointEmbedding, EngineRunner};
use firesteel_step::{
    CacheLayout, CacheLayoutChoice, Embedding, Runner, StepInputs, StepOptions, StepSpec,
};
use firesteel_tensor::{DType, Tensor};

#[test]
fn a_step_of_another_model_is_refused_by_name() {
    type Change = fn(&mut StepSpec);
    let cases: &[(Change, &str)] = &[
        (|s| s.hidden_size = 65, "hidden_size of the step is 65, but "),
        (|s| s.vocab_size = 96, "vocab_size of the step is 96, but "),
        (|s| s.num_attention_heads = 8, "num_attention_heads of the step is 8, but "),
        (|s| s.num_key_value_heads = 1, "num_key_value_heads of the step is 1, but "),
        (|s| s.head_dim = 32, "head_dim of the step is 32, but "),
        (|s| s.layers[3].kind = LayerKind::Sliding, "kind of layer 3 of the step is Sliding, but "),
        (|s| s.first_layer = 1, "layers is 1:9, but "),
        (|s| s.first_layer = usize::MAX, "layers is 18446744073709551615:"),
        (|s| s.layers.clear(), "layers is 0:0, but "),
        (|s| s.sliding_window = Some(9), "sliding_window of the step is Some(9), but "),
        (|s| s.sliding_window = None, "sliding_window of the step is None, but "),
        (|s| s.rope_full = s.rope_sliding, "rope_full of the step is Some(Rope { theta: 10000.0"),
        (|s| s.layers[1].layout = CacheLayout::Roll, "cache of layer 1 of the step is "),
        (|s| s.layers[7].cache_length = 19, "cache of layer 7 of the step is "),
        (|s| s.tokens = 0, "tokens is 0, but "),
        (|s| s.tokens = 2, "input x of the step is (Embedding, F32, [1, 1, 64]), but "),
        (|s| s.inputs.truncate(5), "number of inputs of the step is 5, but "),
        (|s| s.inputs.swap(1, 2), "input sin_sw of the step is "),
        (|s| s.outputs[0].dtype = DType::F16, "output logits of the step is "),
        (|s| s.outputs.truncate(1), "number of outputs of the step is 1, but "),
    ];
    let checkpoint = checkpoint("mini");
    let options = options(&checkpoint, 1, 20, CacheLayoutChoice::Auto);
    let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
    let mut failures = Vec::new();
    for (change, expected) in cases {
        let mut changed = spec.clone();
        change(&mut changed);
        match EngineRunner::new(checkpoint.clone(), changed) {
            Err(error) if error.to_string().starts_with(expected) => {}
            Err(error) => failures.push(format!("expected `{expected}…`, got `{error}`")),
            Ok(_) => failures.push(format!("accepted: {expected}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn other_names_and_mask_values_are_accepted() {
    let checkpoint = checkpoint("mini");
    let options = options(&checkpoint, 1, 20, CacheLayoutChoice::Roll);
    let mut spec = StepSpec::new(checkpoint.config(), &options).unwrap().with_layer_outputs();
    spec.mask_value = -100.0;
    spec.inputs[0].name = "embedded".into();
    assert!(EngineRunner::new(checkpoint, spec).is_ok());
}

#[test]
fn inputs_of_another_spec_are_refused() {
    let checkpoint = checkpoint("mini");
    let options = options(&checkpoint, 1, 20, CacheLayoutChoice::Auto);
    let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
    let other = spec.with_tokens(2).unwrap();
    let tensors: Vec<Tensor> = other
        .inputs
        .iter()
        .map(|input| {
            let count = input.shape.iter().product();
            Tensor::from_f32(input.shape.clone(), vec![0.0; count]).unwrap()
        })
        .collect();
    let inputs = StepInputs::new(&other, tensors.iter().map(Tensor::view).collect()).unwrap();
    let mut runner = EngineRunner::new(checkpoint, spec).unwrap();
    let error = runner.step(&inputs).err().unwrap().to_string();
    assert_eq!(error, "x: expected f32 [1, 1, 64], got f32 [1, 2, 64]");
}

/// Caches around the window's length, steps longer than the cache, every key masked.
#[test]
fn small_contexts_give_finite_outputs() {
    let checkpoint = checkpoint("mini");
    for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
        for (context, tokens) in [(1, 1), (3, 3), (12, 12), (5, 4), (7, 1), (8, 8), (9, 9)] {
            let options = options(&checkpoint, tokens, context, layout);
            for dtype in [DType::F32, DType::F16] {
                let options = StepOptions { dtype, ..options.clone() };
                let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
                let tensors: Vec<Tensor> = spec
                    .inputs
                    .iter()
                    .map(|input| {
                        let count = input.shape.iter().product();
                        let values = vec![-10_000.0; count];
                        Tensor::from_f32_as(dtype, input.shape.clone(), values).unwrap()
                    })
                    .collect();
                let views = tensors.iter().map(Tensor::view).collect();
                let inputs = StepInputs::new(&spec, views).unwrap();
                let mut runner = EngineRunner::new(checkpoint.clone(), spec.clone()).unwrap();
                let outputs = runner.step(&inputs).unwrap();
                let logits = outputs.tensors()[0].view();
                assert_eq!(logits.first_non_finite(), None, "{layout:?} {context} {tokens}");
            }
        }
    }
}

#[test]
fn embedding_rows_are_looked_up_and_ids_checked() {
    let checkpoint = checkpoint("mini-bf16-sharded");
    let embedding = CheckpointEmbedding::new(checkpoint.clone());
    assert_eq!((embedding.rows(), embedding.hidden_size()), (97, 64));
    let mut rows = vec![0f32; 2 * 64];
    embedding.lookup(&[96, 3], &mut rows).unwrap();
    let mut expected = vec![0f32; 2 * 64];
    checkpoint.embedding().read_f32(96 * 64, &mut expected[..64]).unwrap();
    checkpoint.embedding().read_f32(3 * 64, &mut expected[64..]).unwrap();
    assert_eq!(rows, expected);
    let error = |ids: &[u32], length: usize| {
        embedding.lookup(ids, &mut vec![0f32; length]).err().unwrap().to_string()
    };
    assert_eq!(
        error(&[3, 97], 128),
        "engine: model.embedding.weight: token id 97 has no row, 0 to 96 are accepted"
    );
    assert_eq!(
        error(&[3], 63),
        "engine: model.embedding.weight: 1 ids of width 64 do not fill 63 values"
    );
}
