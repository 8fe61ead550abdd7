//! The cache state machine against a plain model: every key bears its position as its value, so
//! what a query can see is read off the inputs of the step.

#![allow(clippy::unwrap_used, reason = "a failed helper is a failed test")]

use firesteel_checkpoint::{Family, LayerKind, ModelConfig, Rope};
use firesteel_step::{
    CacheLayoutChoice, KvState, Role, StepError, StepOptions, StepOutputs, StepSpec, kv_bytes,
};
use firesteel_tensor::{Tensor, TensorView};
use proptest::prelude::*;
use std::collections::BTreeSet;

const KEY_VALUE_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const HIDDEN: usize = 3;

fn config(window: usize) -> ModelConfig {
    ModelConfig {
        family: Family::of_model_type("spark2_5").unwrap(),
        hidden_size: HIDDEN,
        intermediate_size: 8,
        num_attention_heads: 4,
        num_key_value_heads: KEY_VALUE_HEADS,
        head_dim: HEAD_DIM,
        vocab_size: 11,
        sliding_window: Some(window),
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-6,
        layer_types: vec![LayerKind::Sliding, LayerKind::Full],
        rope_sliding: Some(Rope::plain(1e4, 4)),
        rope_full: Some(Rope::plain(5e6, 2)),
        tie_word_embeddings: true,
        dtype: None,
        eos_token_ids: vec![1],
        bos_token_id: None,
        pad_token_id: None,
    }
}

fn spec(window: usize, context: usize, tokens: usize, layout: CacheLayoutChoice) -> StepSpec {
    let config = config(window);
    let options =
        StepOptions { tokens, cache_layout: layout, ..StepOptions::decode(&config, context) };
    StepSpec::new(&config, &options).unwrap()
}

/// Entries `[1, KV, n, D]` that bear `value(i)` everywhere, plus 0.5 in the second head.
fn entries(count: usize, value: impl Fn(usize) -> f32) -> Tensor {
    let mut data = Vec::new();
    for head in 0..KEY_VALUE_HEADS {
        for i in 0..count {
            data.extend([value(i) + 0.5 * head as f32; HEAD_DIM]);
        }
    }
    Tensor::from_f32(vec![1, KEY_VALUE_HEADS, count, HEAD_DIM], data).unwrap()
}

/// First element of each entry of a head.
fn marks(view: &TensorView<'_>, head: usize) -> Vec<f32> {
    let values = view.to_f32().unwrap();
    let count = view.shape()[2];
    (0..count).map(|i| values[(head * count + i) * HEAD_DIM] - 0.5 * head as f32).collect()
}

/// Runs one step as a runner would, checks what each query sees, and returns the outputs.
fn observe(
    spec: &StepSpec,
    state: &KvState,
    inputs: &firesteel_step::StepInputs<'_>,
) -> StepOutputs {
    let position = state.position();
    let mut tensors = Vec::new();
    for output in &spec.outputs {
        let tensor = match output.role {
            Role::KeyNew(i) | Role::ValueNew(i) => {
                let is_key = matches!(output.role, Role::KeyNew(_));
                let layer = &spec.layers[i];
                let role = if is_key { Role::KeyCache(i) } else { Role::ValueCache(i) };
                let cache = inputs.get(spec, role).unwrap();
                let sign = if is_key { 1.0 } else { -1.0 };
                let mut held = Vec::new();
                for head in 0..KEY_VALUE_HEADS {
                    held = marks(&cache, head);
                    held.extend((0..spec.tokens).map(|t| sign * (position + t + 1) as f32));
                    let kept = &held[spec.dropped_entries(layer)..];
                    let mask = inputs.get(spec, Role::Mask(layer.kind)).unwrap();
                    let mask_values = mask.to_f32().unwrap();
                    for t in 0..spec.tokens {
                        let query = position + t;
                        let row = &mask_values[t * kept.len()..(t + 1) * kept.len()];
                        let seen: Vec<i64> = kept
                            .iter()
                            .zip(row)
                            .filter(|(_, m)| **m == 0.0)
                            .map(|(mark, _)| (sign * mark) as i64 - 1)
                            .collect();
                        let first = match layer.kind {
                            LayerKind::Sliding => {
                                (query + 1).saturating_sub(spec.sliding_window.unwrap())
                            }
                            LayerKind::Full => 0,
                        };
                        let expected: BTreeSet<i64> = (first..=query).map(|p| p as i64).collect();
                        assert_eq!(seen.len(), expected.len(), "{layer:?} query {query}: {seen:?}");
                        assert_eq!(
                            seen.into_iter().collect::<BTreeSet<_>>(),
                            expected,
                            "{layer:?} query {query}"
                        );
                    }
                }
                let returned = spec.returned_entries(layer);
                let tail = held.split_off(held.len() - returned);
                entries(returned, |i| tail[i])
            }
            _ => Tensor::from_f32(output.shape.clone(), vec![0.0; output.shape.iter().product()])
                .unwrap(),
        };
        tensors.push(tensor);
    }
    StepOutputs::new(spec, tensors).unwrap()
}

fn advance(state: &mut KvState, spec: &StepSpec) {
    let x = vec![0.1; spec.tokens * HIDDEN];
    let step = state.prepare(spec, &x).unwrap();
    let outputs = observe(spec, state, &state.inputs(spec, &step).unwrap());
    state.commit(spec, step, &outputs).unwrap();
}

#[test]
fn window_edges_and_chunk_borders() {
    use CacheLayoutChoice::{Auto, Ring, Roll};
    for layout in [Auto, Ring, Roll] {
        for (window, context) in [(8, 40), (8, 8), (8, 7), (8, 5), (8, 9), (2, 9), (3, 1)] {
            let decode = spec(window, context, 1, layout);
            let mut state = KvState::new(&decode).unwrap();
            for _ in 0..context {
                advance(&mut state, &decode);
            }
            assert!(matches!(
                state.prepare(&decode, &[0.0; HIDDEN]),
                Err(StepError::ContextFull { .. })
            ));
        }
        let chunks = [5, 12, 3, 1, 8, 7, 4];
        let mut state = KvState::new(&spec(8, 40, 1, layout)).unwrap();
        for tokens in chunks {
            advance(&mut state, &spec(8, 40, tokens, layout));
        }
        assert_eq!(state.position(), 40);
    }
}

proptest! {
    #[test]
    fn any_chunks_see_what_the_model_sees(
        window in 2usize..10,
        context in 1usize..30,
        chunks in prop::collection::vec(1usize..14, 1..12),
        layout in prop::sample::select(vec![
            CacheLayoutChoice::Auto, CacheLayoutChoice::Ring, CacheLayoutChoice::Roll,
        ]),
        seeded in 0usize..30,
    ) {
        let mut state = KvState::new(&spec(window, context, 1, layout)).unwrap();
        let seeded = seeded.min(context);
        let keys = entries(seeded, |i| (i + 1) as f32);
        let values = entries(seeded, |i| -((i + 1) as f32));
        let history = vec![(keys.view(), values.view()); 2];
        state.seed(&history).unwrap();
        for tokens in chunks {
            if tokens > context {
                let config = config(window);
                let options = StepOptions {
                    tokens,
                    cache_layout: layout,
                    ..StepOptions::decode(&config, context)
                };
                prop_assert!(StepSpec::new(&config, &options).is_err());
                continue;
            }
            let step = spec(window, context, tokens, layout);
            if state.position() + tokens > context {
                let x = vec![0.0; tokens * HIDDEN];
                prop_assert!(state.prepare(&step, &x).is_err());
            } else {
                advance(&mut state, &step);
            }
        }
    }
}

/// Runs a step and keeps the first `kept` tokens of it.
fn advance_part(state: &mut KvState, spec: &StepSpec, kept: usize) -> Result<(), StepError> {
    let x = vec![0.1; spec.tokens * HIDDEN];
    let step = state.prepare(spec, &x).unwrap();
    let outputs = observe(spec, state, &state.inputs(spec, &step).unwrap());
    state.commit_first(spec, step, &outputs, kept)
}

/// Whether all that a sliding layer sees before `position` is in windows that end at `ends`.
fn is_held(position: usize, length: usize, ends: &[usize]) -> bool {
    (position.saturating_sub(length)..position)
        .all(|p| ends.iter().any(|&end| p < end && end <= p + length))
}

#[derive(Debug, Clone)]
enum Move {
    Step { tokens: usize, kept: usize },
    Mark,
    Rewind(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let step = (1usize..14, 0usize..14).prop_map(|(tokens, kept)| Move::Step { tokens, kept });
    prop::collection::vec(
        prop_oneof![4 => step, 2 => Just(Move::Mark), 1 => (0usize..60).prop_map(Move::Rewind)],
        1..30,
    )
}

proptest! {
    /// Every step checks that its queries see the right positions, and those alone.
    #[test]
    fn what_was_dropped_or_taken_back_is_as_if_it_had_never_been(
        window in 2usize..10,
        context in 1usize..60,
        moves in moves(),
        layout in prop::sample::select(vec![CacheLayoutChoice::Ring, CacheLayoutChoice::Roll]),
    ) {
        let decode = spec(window, context, 1, layout);
        let length = decode.layers[0].cache_length;
        let mut state = KvState::new(&decode).unwrap();
        let mut marks: Vec<usize> = Vec::new();
        for action in moves {
            let position = state.position();
            match action {
                Move::Step { tokens, kept } if tokens <= context && position + tokens <= context => {
                    let step = spec(window, context, tokens, layout);
                    let possible = kept == tokens
                        || kept < tokens && (layout == CacheLayoutChoice::Ring || tokens <= length);
                    let result = advance_part(&mut state, &step, kept);
                    prop_assert_eq!(result.is_ok(), possible);
                    prop_assert_eq!(state.position(), position + if possible { kept } else { 0 });
                }
                Move::Step { .. } => {}
                Move::Mark => {
                    state.mark();
                    if marks.last() != Some(&position) {
                        marks.push(position);
                    }
                    let dropped = marks.len().saturating_sub(3);
                    marks.drain(..dropped);
                }
                Move::Rewind(to) => {
                    let ends: Vec<usize> = marks.iter().copied().chain([position]).collect();
                    let expected =
                        (0..=to.min(position)).rev().find(|&p| is_held(p, length, &ends));
                    prop_assert_eq!(Some(state.rewind(to)), expected);
                    prop_assert_eq!(Some(state.position()), expected);
                    marks.retain(|&mark| Some(mark) <= expected);
                    if expected == Some(0) && position > 0 {
                        marks.clear();
                    }
                }
            }
        }
        // And what follows is right too.
        while state.position() < context {
            advance(&mut state, &decode);
        }
    }
}

#[test]
fn a_rewound_step_is_stale_and_a_part_needs_room() {
    let one = spec(8, 40, 1, CacheLayoutChoice::Roll);
    let mut state = KvState::new(&one).unwrap();
    advance(&mut state, &one);
    let step = state.prepare(&one, &[0.0; HIDDEN]).unwrap();
    assert_eq!(state.rewind(7), 1);
    assert!(state.inputs(&one, &step).is_err());
    let nine = spec(8, 40, 9, CacheLayoutChoice::Roll);
    let error = advance_part(&mut state, &nine, 8).unwrap_err().to_string();
    assert_eq!(
        error,
        "8 of 9 tokens of a step cannot be kept: at most all of them can, and fewer only in steps \
         no longer than the window of every rolled layer"
    );
    advance(&mut state, &nine);
    assert_eq!(state.position(), 10);
    state.clear();
    assert_eq!(state.rewind(5), 0);
}

#[test]
fn a_step_commits_once_and_only_while_it_is_the_next() {
    let spec = spec(8, 16, 1, CacheLayoutChoice::Auto);
    let mut state = KvState::new(&spec).unwrap();
    let first = state.prepare(&spec, &[0.0; HIDDEN]).unwrap();
    let second = state.prepare(&spec, &[0.0; HIDDEN]).unwrap();
    let outputs = observe(&spec, &state, &state.inputs(&spec, &first).unwrap());
    state.commit(&spec, first, &outputs).unwrap();
    let error = state.commit(&spec, second, &outputs).unwrap_err();
    assert!(matches!(error, StepError::Stale { prepared: 0, current: 1 }), "{error}");
    let stale = state.prepare(&spec, &[0.0; HIDDEN]).unwrap();
    state.clear();
    assert!(state.inputs(&spec, &stale).is_err());
    assert!(state.commit(&spec, stale, &outputs).is_err());
    assert_eq!(state.position(), 0);
}

#[test]
fn bad_outputs_leave_the_cache_untouched() {
    let spec = spec(8, 16, 1, CacheLayoutChoice::Auto);
    let mut state = KvState::new(&spec).unwrap();
    advance(&mut state, &spec);
    let keys = |state: &KvState| -> Vec<Vec<u8>> {
        let step = state.prepare(&spec, &[0.0; HIDDEN]).unwrap();
        let inputs = state.inputs(&spec, &step).unwrap();
        inputs.tensors().iter().map(|t| t.bytes().to_vec()).collect()
    };
    let before = keys(&state);
    let step = state.prepare(&spec, &[0.0; HIDDEN]).unwrap();
    let good = observe(&spec, &state, &state.inputs(&spec, &step).unwrap());
    // The last output is broken, so that a careless commit would have written all others.
    let mut tensors = good.tensors().to_vec();
    let last = tensors.len() - 1;
    tensors[last] = entries(1, |_| f32::NAN);
    let bad = StepOutputs::new(&spec, tensors).unwrap();
    let error = state.commit(&spec, step, &bad).unwrap_err().to_string();
    assert_eq!(error, "v_new_1 is not finite at element 0; nothing was written to the cache");
    assert_eq!(keys(&state), before);
    assert_eq!(state.position(), 1);
}

#[test]
fn another_layout_is_refused_by_name() {
    let ring = spec(8, 16, 1, CacheLayoutChoice::Ring);
    let state = KvState::new(&ring).unwrap();
    let longer = spec(8, 17, 1, CacheLayoutChoice::Ring);
    let error = state.prepare(&longer, &[0.0; HIDDEN]).unwrap_err().to_string();
    assert_eq!(error, "the step's context differs from the cache's: 17 against 16");
    let roll = spec(8, 16, 1, CacheLayoutChoice::Roll);
    assert!(state.prepare(&roll, &[0.0; HIDDEN]).is_err());
    assert!(state.prepare(&ring, &[0.0; HIDDEN + 1]).is_err());
    assert!(state.prepare(&ring, &[f32::NAN; HIDDEN]).is_err());
}

#[test]
fn contract_names_and_shapes() {
    let step = spec(8, 20, 3, CacheLayoutChoice::Roll);
    let list = |tensors: &[firesteel_step::TensorSpec]| -> Vec<String> {
        tensors.iter().map(|t| format!("{} {:?}", t.name, t.shape)).collect()
    };
    assert_eq!(
        list(&step.inputs),
        [
            "x [1, 3, 3]",
            "cos_sw [1, 1, 3, 4]",
            "sin_sw [1, 1, 3, 4]",
            "cos_full [1, 1, 3, 2]",
            "sin_full [1, 1, 3, 2]",
            "mask_sw [1, 1, 3, 10]",
            "mask_full [1, 1, 3, 23]",
            "k_cache_0 [1, 2, 8, 4]",
            "v_cache_0 [1, 2, 8, 4]",
            "k_cache_1 [1, 2, 20, 4]",
            "v_cache_1 [1, 2, 20, 4]",
        ]
    );
    assert_eq!(
        list(&step.outputs),
        [
            "logits [1, 11]",
            "k_new_0 [1, 2, 8, 4]",
            "v_new_0 [1, 2, 8, 4]",
            "k_new_1 [1, 2, 3, 4]",
            "v_new_1 [1, 2, 3, 4]",
        ]
    );
    let state = KvState::new(&step).unwrap();
    assert_eq!(state.bytes(), step.cache_bytes());
}

#[test]
fn kv_bytes_are_the_published_integers() {
    let mut config = config(512);
    config.num_key_value_heads = 2;
    config.head_dim = 256;
    config.layer_types =
        [LayerKind::Sliding, LayerKind::Sliding, LayerKind::Sliding, LayerKind::Full].repeat(7);
    let bytes = |context, layout| kv_bytes(&config, 0..28, context, layout, 2).unwrap();
    assert_eq!(bytes(4096, CacheLayoutChoice::Roll).hybrid, 80_740_352);
    assert_eq!(bytes(4096, CacheLayoutChoice::Ring).hybrid, 80_697_344);
    assert_eq!(bytes(4096, CacheLayoutChoice::Ring).uniform, 224 << 20);
    assert_eq!(bytes(32_768, CacheLayoutChoice::Roll).hybrid, 491_782_144);
    assert_eq!(bytes(32_768, CacheLayoutChoice::Roll).uniform, 1792 << 20);
    assert_eq!(kv_bytes(&config, 0..28, usize::MAX, CacheLayoutChoice::Auto, 2), None);
    assert_eq!(kv_bytes(&config, 0..29, 1, CacheLayoutChoice::Auto, 2), None);
}
