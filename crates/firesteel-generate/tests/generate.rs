//! The generation loop on a runner with a script in place of a model.
#![allow(clippy::unwrap_used, reason = "the helpers of these tests may panic as the tests do")]

use firesteel_checkpoint::{LayerKind, ModelConfig, Rope};
use firesteel_generate::{
    AddedTokens, Event, GenerateError, GenerateOptions, Generator, SamplingOptions, StopReason,
    Tokenizer,
};
use firesteel_step::{
    CacheLayoutChoice, Embedding, Logits, Role, Runner, RunnerError, StepInputs, StepOptions,
    StepOutputs, StepSpec,
};
use firesteel_tensor::{DType, Tensor};
use std::ops::ControlFlow;
use std::path::Path;

const VOCABULARY: usize = 2052;
const EOS: u32 = 1;

fn config() -> ModelConfig {
    ModelConfig {
        model_type: "spark2_5".into(),
        hidden_size: 4,
        intermediate_size: 4,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 2,
        vocab_size: VOCABULARY,
        sliding_window: Some(3),
        max_position_embeddings: 64,
        rms_norm_eps: 1e-6,
        layer_types: vec![LayerKind::Sliding, LayerKind::Full],
        rope_sliding: Some(Rope { theta: 1e4, dims: 2 }),
        rope_full: Some(Rope { theta: 1e4, dims: 2 }),
        tie_word_embeddings: true,
        dtype: None,
        eos_token_ids: vec![EOS],
        bos_token_id: None,
        pad_token_id: None,
    }
}

fn spec(tokens: usize, context: usize, logits: Logits) -> StepSpec {
    let cache_layout = CacheLayoutChoice::Auto;
    let options =
        StepOptions { tokens, context, layers: 0..2, cache_layout, logits, dtype: DType::F32 };
    StepSpec::new(&config(), &options).unwrap()
}

/// The id in the first column, so that a runner can read which ids it was given.
struct IdEmbedding;

impl Embedding for IdEmbedding {
    fn hidden_size(&self) -> usize {
        4
    }

    fn rows(&self) -> usize {
        VOCABULARY
    }

    fn lookup(&self, ids: &[u32], out: &mut [f32]) -> Result<(), RunnerError> {
        out.fill(0.0);
        for (row, &id) in out.chunks_exact_mut(4).zip(ids) {
            row[0] = id as f32;
        }
        Ok(())
    }
}

/// Answers id n with `next(n)` as the largest logit, and notes the ids of each step. The row of
/// an id without a token, 2050, is larger still.
struct Scripted {
    spec: StepSpec,
    next: fn(u32) -> u32,
    steps: Vec<Vec<u32>>,
}

impl Scripted {
    fn new(spec: StepSpec, next: fn(u32) -> u32) -> Self {
        Self { spec, next, steps: Vec::new() }
    }
}

impl Runner for Scripted {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        "scripted"
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let x = inputs.get(&self.spec, Role::Embedding).unwrap().to_f32().unwrap();
        let ids: Vec<u32> = x.chunks_exact(4).map(|row| row[0] as u32).collect();
        let outputs = self.spec.outputs.iter().map(|output| {
            let mut values = vec![0f32; output.shape.iter().product()];
            if output.role == Role::Logits {
                let rows = values.len() / VOCABULARY;
                let shown = &ids[ids.len() - rows..];
                for (row, &id) in values.chunks_exact_mut(VOCABULARY).zip(shown) {
                    row[(self.next)(id) as usize] = 50.0;
                    row[2050] = 60.0;
                }
            }
            Tensor::from_f32(output.shape.clone(), values).unwrap()
        });
        let outputs = StepOutputs::new(&self.spec, outputs.collect())?;
        self.steps.push(ids);
        Ok(outputs)
    }
}

fn tokenizer() -> Tokenizer {
    Tokenizer::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/spark-tiny")))
        .unwrap()
}

fn go(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn up_to(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens: Some(max_tokens), ..GenerateOptions::default() }
}

fn message(result: Result<impl Sized, GenerateError>) -> String {
    result.err().unwrap().to_string()
}

#[test]
fn the_loop_stops_for_the_right_reason() {
    let tokenizer = tokenizer();
    // (successor, context, prompt, max_tokens, ids, reason, decode steps)
    type Case = (fn(u32) -> u32, usize, Vec<u32>, Option<usize>, Vec<u32>, StopReason, usize);
    let count: fn(u32) -> u32 = |id| id + 1;
    let end_after_52: fn(u32) -> u32 = |id| if id == 52 { EOS } else { id + 1 };
    let cases: [Case; 7] = [
        (count, 16, vec![50], Some(3), vec![51, 52, 53], StopReason::MaxTokens, 2),
        (count, 16, vec![50], Some(0), vec![], StopReason::MaxTokens, 0),
        (end_after_52, 16, vec![40, 50], None, vec![51, 52, EOS], StopReason::EndOfSequence, 2),
        (end_after_52, 16, vec![52], Some(1), vec![EOS], StopReason::EndOfSequence, 0),
        (count, 4, vec![50, 60], None, vec![61, 62, 63], StopReason::ContextFull, 2),
        (count, 4, vec![50, 60], Some(3), vec![61, 62, 63], StopReason::MaxTokens, 2),
        (count, 3, vec![50, 60, 70], None, vec![71], StopReason::ContextFull, 0),
    ];
    for (next, context, prompt, max_tokens, ids, stop, decode_steps) in cases {
        let mut runner = Scripted::new(spec(1, context, Logits::Last), next);
        let mut generator = Generator::new(&config(), &mut runner, &IdEmbedding)
            .unwrap()
            .with_tokenizer(&tokenizer);
        let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
        // The second round starts from an empty cache and comes out the same.
        for _ in 0..2 {
            let result = generator.generate(&prompt, &options, &mut go).unwrap();
            assert_eq!((&result.ids, result.stop), (&ids, stop), "context {context}");
            let shown: Vec<u32> = ids.iter().copied().filter(|&id| id != EOS).collect();
            assert_eq!(result.text.unwrap(), tokenizer.decode(&shown));
            let stats = result.stats;
            assert_eq!(stats.prompt_tokens, prompt.len());
            assert_eq!((stats.prefill_steps, stats.decode_steps), (prompt.len(), decode_steps));
            assert_eq!(stats.generated_tokens, ids.len());
            assert_eq!(stats.time_to_first_token_seconds.is_some(), !ids.is_empty());
            assert_eq!(stats.decode_tokens_per_second().is_some(), decode_steps > 0);
            assert!(stats.prefill_tokens_per_second().unwrap() > 0.0);
        }
    }
}

#[test]
fn prefill_takes_whole_chunks_and_decode_the_rest() {
    // (tokens of a chunk, output, prompt length, prefill steps, decode steps for the prompt)
    let cases = [
        (4, Logits::Last, 10, 2, 2),
        (4, Logits::All, 8, 2, 0),
        (4, Logits::Last, 8, 2, 0),
        (4, Logits::Hidden, 8, 1, 4),
        (4, Logits::Hidden, 9, 2, 1),
        (4, Logits::Last, 3, 0, 3),
        (16, Logits::All, 16, 1, 0),
    ];
    for (tokens, logits, length, chunks, singles) in cases {
        let mut decode = Scripted::new(spec(1, 20, Logits::Last), |id| id + 1);
        let mut prefill = Scripted::new(spec(tokens, 20, logits), |id| id + 1);
        let prompt: Vec<u32> = (100..).take(length).collect();
        let mut seen = Vec::new();
        let mut on_event = |event: Event<'_>| {
            if let Event::Prefill { done, total } = event {
                assert_eq!(total, length);
                seen.push(done);
            }
            ControlFlow::Continue(())
        };
        let generator = Generator::new(&config(), &mut decode, &IdEmbedding).unwrap();
        let mut generator = generator.with_prefill(&mut prefill).unwrap();
        // Without a tokenizer nothing masks the row that has no token.
        let result = generator.generate(&prompt, &up_to(1), &mut on_event).unwrap();
        assert_eq!((result.ids, result.text), (vec![2050], None));
        assert_eq!(result.stats.prefill_steps, chunks + singles);
        assert_eq!((prefill.steps.len(), decode.steps.len()), (chunks, singles));
        assert_eq!([prefill.steps.concat(), decode.steps.concat()].concat(), prompt);
        assert_eq!(*seen.last().unwrap(), length);
    }
}

#[test]
fn logits_of_the_last_prompt_token_decide() {
    let tokenizer = tokenizer();
    for logits in [Logits::Last, Logits::All] {
        let mut decode = Scripted::new(spec(1, 20, Logits::Last), |id| id + 1);
        let mut prefill = Scripted::new(spec(3, 20, logits), |id| id + 1);
        let generator = Generator::new(&config(), &mut decode, &IdEmbedding).unwrap();
        let mut generator =
            generator.with_prefill(&mut prefill).unwrap().with_tokenizer(&tokenizer);
        let result = generator.generate(&[7, 300, 200], &up_to(2), &mut go).unwrap();
        assert_eq!(result.ids, [201, 202]);
    }
}

#[test]
fn sampling_never_takes_an_id_without_a_token() {
    let tokenizer = tokenizer();
    let mut runner = Scripted::new(spec(1, 400, Logits::Last), |id| id + 1);
    let mut generator =
        Generator::new(&config(), &mut runner, &IdEmbedding).unwrap().with_tokenizer(&tokenizer);
    let sampling = SamplingOptions { temperature: 30.0, top_k: 0, top_p: 1.0, seed: 5 };
    let options = GenerateOptions { max_tokens: Some(300), sampling };
    let result = generator.generate(&[50], &options, &mut go).unwrap();
    assert!(result.ids.iter().all(|&id| tokenizer.has_token(id)));
    assert_eq!(generator.generate(&[50], &options, &mut go).unwrap().ids, result.ids);
}

#[test]
fn events_carry_the_text_and_can_break_off() {
    let tokenizer = tokenizer();
    let crab = tokenizer.encode("🦀", AddedTokens::AsText).unwrap();
    let [first, second] = [crab[0], crab[1]];
    assert!(first != second);
    let run = |stop_at: usize| {
        // From id 50 to the crab's first token, and no further.
        let mut runner =
            Scripted::new(spec(1, 16, Logits::Last), |id| if id == 50 { 51 } else { 172 });
        let mut generator = Generator::new(&config(), &mut runner, &IdEmbedding)
            .unwrap()
            .with_tokenizer(&tokenizer);
        let mut events = Vec::new();
        let mut on_event = |event: Event<'_>| {
            events.push(format!("{event:?}"));
            if events.len() == stop_at { ControlFlow::Break(()) } else { go(event) }
        };
        let result = generator.generate(&[49, 50], &up_to(2), &mut on_event).unwrap();
        (result, events)
    };
    assert_eq!(tokenizer.token_bytes(172).map(|b| b[0] >= 0xc0), Some(true));
    let (result, events) = run(usize::MAX);
    let shown = tokenizer.decode(&[51]);
    assert_eq!(
        events,
        [
            "Prefill { done: 1, total: 2 }".to_owned(),
            "Prefill { done: 2, total: 2 }".to_owned(),
            format!("Token {{ id: 51, text: {shown:?} }}"),
            "Token { id: 172, text: \"\" }".to_owned(),
            "Tail { text: \"\u{fffd}\" }".to_owned(),
        ]
    );
    assert_eq!(result.text.unwrap(), format!("{shown}\u{fffd}"));
    for (stop_at, ids) in [(1, vec![]), (2, vec![]), (3, vec![51])] {
        let (result, events) = run(stop_at);
        assert_eq!((result.ids, result.stop), (ids, StopReason::Cancelled));
        assert_eq!(events.len(), stop_at);
    }
}

#[test]
fn prompts_that_cannot_run_are_refused() {
    let mut runner = Scripted::new(spec(1, 4, Logits::Last), |id| id + 1);
    let mut generator = Generator::new(&config(), &mut runner, &IdEmbedding).unwrap();
    let options = GenerateOptions::default();
    let mut error = |prompt: &[u32]| message(generator.generate(prompt, &options, &mut go));
    assert_eq!(error(&[]), "the prompt is empty: at least one token is needed");
    assert_eq!(
        error(&[5; 5]),
        "the prompt has 5 tokens, but the context holds 4; shorten the prompt or use a larger \
         context"
    );
    assert_eq!(error(&[5, 2052]), "prompt[1] is id 2052, but the embedding has 2052 rows");
    let sampling = SamplingOptions { top_p: 0.0, ..SamplingOptions::GREEDY };
    let options = GenerateOptions { max_tokens: None, sampling };
    assert!(message(generator.generate(&[5], &options, &mut go)).starts_with("top_p is 0"));
    assert!(runner.steps.is_empty());
}

#[test]
fn runners_that_do_not_fit_are_refused() {
    let refused = |spec: StepSpec| {
        let mut runner = Scripted::new(spec, |id| id);
        message(Generator::new(&config(), &mut runner, &IdEmbedding))
    };
    assert_eq!(
        refused(spec(2, 8, Logits::Last)),
        "runner scripted: the tokens of a step is 2, but generation needs 1"
    );
    assert_eq!(
        refused(spec(1, 8, Logits::Hidden)),
        "runner scripted: the output is the hidden state, but generation needs logits"
    );
    let one_layer = StepOptions {
        tokens: 1,
        context: 8,
        layers: 1..2,
        cache_layout: CacheLayoutChoice::Auto,
        logits: Logits::Last,
        dtype: DType::F32,
    };
    assert_eq!(
        refused(StepSpec::new(&config(), &one_layer).unwrap()),
        "runner scripted: the range of layers is 1..2, but generation needs 0..2"
    );
    let prefill = |spec_of_prefill: StepSpec| {
        let mut decode = Scripted::new(spec(1, 8, Logits::Last), |id| id);
        let mut prefill = Scripted::new(spec_of_prefill, |id| id);
        let generator = Generator::new(&config(), &mut decode, &IdEmbedding).unwrap();
        message(generator.with_prefill(&mut prefill))
    };
    assert_eq!(
        prefill(spec(4, 9, Logits::Last)),
        "runner scripted: the context is 9, but generation needs 8"
    );
    let rolled =
        StepOptions { tokens: 4, layers: 0..2, cache_layout: CacheLayoutChoice::Roll, ..one_layer };
    let error = prefill(StepSpec::new(&config(), &rolled).unwrap());
    assert!(
        error.starts_with("runner scripted: an input is \"k_cache_0 f32 [1, 1, 3, 2]\""),
        "{error}"
    );
}
