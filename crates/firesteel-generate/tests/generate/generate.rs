//! The generation loop on a runner with a script in place of a model.

use firesteel_checkpoint::{Family, LayerKind, ModelConfig, Rope};
use firesteel_generate::{
    AddedTokens, Event, GenerateError, GenerateOptions, Generation, Generator, MODEL_FORWARD_MS,
    MODEL_SAMPLE_MS, SamplingOptions, StepStats, StopReason, Tokenizer,
};
use firesteel_step::{
    CacheLayoutChoice, Embedding, Logits, Role, Runner, RunnerError, StepDecoder, StepInputs,
    StepOptions, StepOutputs, StepSpec,
};
use firesteel_tensor::Tensor;
use firesteel_testing::spark_tiny_path;
use std::ops::ControlFlow;

const VOCABULARY: usize = 2052;
const EOS: u32 = 1;

fn config() -> ModelConfig {
    ModelConfig {
        family: Family::of_model_type("spark2_5").unwrap(),
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
        rope_sliding: Some(Rope::plain(1e4, 2)),
        rope_full: Some(Rope::plain(1e4, 2)),
        tie_word_embeddings: true,
        dtype: None,
        eos_token_ids: vec![EOS],
        bos_token_id: None,
        pad_token_id: None,
    }
}

fn spec(tokens: usize, context: usize, logits: Logits) -> StepSpec {
    let config = config();
    let options = StepOptions { tokens, logits, ..StepOptions::decode(&config, context) };
    StepSpec::new(&config, &options).unwrap()
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
    Tokenizer::open(&spark_tiny_path()).unwrap()
}

/// A generator on a runner, and on a second one for the prompt.
fn generator<'a>(runner: &'a mut Scripted, prefill: Option<&'a mut Scripted>) -> Generator<'a> {
    let decoder = StepDecoder::new(&config(), Box::new(runner), Box::new(IdEmbedding)).unwrap();
    let decoder = match prefill {
        Some(prefill) => decoder.with_runner(Box::new(prefill)).unwrap(),
        None => decoder,
    };
    Generator::new(&config(), Box::new(decoder)).unwrap()
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

fn refusal(result: Result<impl Sized, RunnerError>) -> String {
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
        let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
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
        let mut generator = generator(&mut decode, Some(&mut prefill));
        // Without a tokenizer nothing masks the row that has no token.
        let result = generator.generate(&prompt, &up_to(1), &mut on_event).unwrap();
        assert_eq!((result.ids, result.text), (vec![2050], None));
        assert_eq!(result.stats.prefill_steps, chunks + singles);
        drop(generator);
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
        let mut generator = generator(&mut decode, Some(&mut prefill)).with_tokenizer(&tokenizer);
        let result = generator.generate(&[7, 300, 200], &up_to(2), &mut go).unwrap();
        assert_eq!(result.ids, [201, 202]);
    }
}

#[test]
fn sampling_never_takes_an_id_without_a_token() {
    let tokenizer = tokenizer();
    let mut runner = Scripted::new(spec(1, 400, Logits::Last), |id| id + 1);
    let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
    let sampling = SamplingOptions { temperature: 30.0, seed: 5, ..SamplingOptions::GREEDY };
    let options = GenerateOptions { max_tokens: Some(300), sampling, ..Default::default() };
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
        let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
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
            format!("Token {{ id: 51, text: {shown:?}, logprobs: None }}"),
            "Token { id: 172, text: \"\", logprobs: None }".to_owned(),
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

/// Counts up from 50 with `options`; returns the result and the shown text, token by token and the
/// tail.
fn counted(options: &GenerateOptions, tokenizer: &Tokenizer) -> (Generation, Vec<String>) {
    let mut runner = Scripted::new(spec(1, 64, Logits::Last), |id| id + 1);
    let mut generator = generator(&mut runner, None).with_tokenizer(tokenizer);
    let mut shown = Vec::new();
    let mut on_event = |event: Event<'_>| {
        if let Event::Token { text, .. } | Event::Tail { text } = event {
            shown.push(text.to_owned());
        }
        go(event)
    };
    let result = generator.generate(&[49, 50], options, &mut on_event).unwrap();
    (result, shown)
}

#[test]
fn text_ends_before_any_stop_string() {
    let tokenizer = tokenizer();
    let (free, _) = counted(&up_to(12), &tokenizer);
    let whole = free.text.unwrap();
    assert_eq!(whole.len(), 12, "each token is a character");
    for start in 0..whole.len() {
        for end in start + 1..=whole.len() {
            let stop = vec!["no such text".to_owned(), whole[start..end].to_owned()];
            let options = GenerateOptions { stop, ..up_to(12) };
            let (result, shown) = counted(&options, &tokenizer);
            let found = whole.find(&whole[start..end]).unwrap();
            assert_eq!(result.text.as_deref(), Some(&whole[..found]));
            assert_eq!(result.stop, StopReason::StopString(1));
            assert_eq!(result.ids, free.ids[..found + end - start]);
            assert_eq!(shown.concat(), whole[..found]);
            assert_eq!(shown.len(), result.ids.len(), "there is no tail");
        }
    }
    // What could have been the beginning of a stop string comes at the end.
    let stop = vec![format!("{}!", &whole[9..])];
    let (result, shown) = counted(&GenerateOptions { stop, ..up_to(12) }, &tokenizer);
    assert_eq!((result.text.as_deref(), result.stop), (Some(&*whole), StopReason::MaxTokens));
    assert_eq!(shown.last().map(String::as_str), Some(&whole[9..]));
    // In the first tokens it is not looked for, nor across their end.
    for (min_tokens, stopped) in [(3, true), (4, false), (5, false)] {
        let stop = vec![whole[3..5].to_owned()];
        let sampling = SamplingOptions { min_tokens, ..SamplingOptions::GREEDY };
        let options = GenerateOptions { stop, sampling, ..up_to(12) };
        let (result, _) = counted(&options, &tokenizer);
        assert_eq!(result.stop == StopReason::StopString(0), stopped, "{min_tokens}");
        assert_eq!(result.text.unwrap(), if stopped { &whole[..3] } else { &*whole });
    }
}

#[test]
fn stop_ids_end_the_sequence_and_have_no_text() {
    let tokenizer = tokenizer();
    let shown = tokenizer.decode(&[51]);
    let options = GenerateOptions { stop_ids: vec![99, 52, EOS], ..up_to(12) };
    let (result, _) = counted(&options, &tokenizer);
    assert_eq!((result.ids, result.stop), (vec![51, 52], StopReason::StopId(52)));
    assert_eq!(result.text.unwrap(), shown);
    assert_eq!(
        serde_json::to_string(&[StopReason::StopId(52), StopReason::MaxTokens]).unwrap(),
        r#"[{"stop_id":52},"max_tokens"]"#
    );
    // An end token stays one, and neither comes before its time.
    for (end, stop) in [(EOS, StopReason::EndOfSequence), (600, StopReason::StopId(600))] {
        for min_tokens in [0, 1, 5] {
            let next: fn(u32) -> u32 = if end == EOS { |_| EOS } else { |_| 600 };
            let mut runner = Scripted::new(spec(1, 64, Logits::Last), next);
            let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
            let sampling = SamplingOptions { min_tokens, ..SamplingOptions::GREEDY };
            let options = GenerateOptions { sampling, stop_ids: vec![EOS, 600], ..up_to(12) };
            let result = generator.generate(&[50], &options, &mut go).unwrap();
            assert_eq!((result.ids.len(), result.stop), (min_tokens + 1, stop));
            assert_eq!(result.ids.iter().filter(|&&id| id == end).count(), 1);
        }
    }
}

#[test]
fn log_probabilities_come_with_the_tokens() {
    let tokenizer = tokenizer();
    let mut runner = Scripted::new(spec(1, 64, Logits::Last), |id| id + 1);
    let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
    let options = GenerateOptions { top_logprobs: Some(2), ..up_to(3) };
    let mut seen = Vec::new();
    let mut on_event = |event: Event<'_>| {
        if let Event::Token { id, logprobs, .. } = event {
            let logprobs = logprobs.unwrap();
            assert_eq!(logprobs.picked.id, id);
            seen.push(logprobs.clone());
        }
        go(event)
    };
    let result = generator.generate(&[50], &options, &mut on_event).unwrap();
    for (logprobs, id) in seen.iter().zip([51, 52, 53]) {
        // All others have logit 0, and e^−50 is nothing next to 1.
        assert_eq!((logprobs.picked.id, logprobs.picked.logprob), (id, 0.0));
        let top: Vec<(u32, f32)> = logprobs.top.iter().map(|top| (top.id, top.logprob)).collect();
        assert_eq!(top, [(id, 0.0), (0, -50.0)]);
    }
    let json = serde_json::to_value(&result).unwrap();
    assert_eq!(json["logprobs"][0]["top"][1], serde_json::json!({"id": 0, "logprob": -50.0}));
    assert_eq!(result.logprobs, Some(seen));
    let plain = generator.generate(&[50], &up_to(3), &mut go).unwrap();
    assert_eq!(plain.logprobs, None);
    assert_eq!(serde_json::to_value(&plain).unwrap().get("logprobs"), None);
}

#[test]
fn penalties_and_bad_words_reach_the_sampler() {
    let tokenizer = tokenizer();
    // Answers 60 for ever; the next largest logits are all 0.
    let ids = |sampling: SamplingOptions, prompt: &[u32]| {
        let mut runner = Scripted::new(spec(1, 64, Logits::Last), |_| 60);
        let mut generator = generator(&mut runner, None).with_tokenizer(&tokenizer);
        let options = GenerateOptions { sampling, ..up_to(3) };
        generator.generate(prompt, &options, &mut go).unwrap().ids
    };
    let greedy = SamplingOptions::GREEDY;
    assert_eq!(ids(greedy.clone(), &[50]), [60, 60, 60]);
    let bad_words = vec![vec![50, 60], vec![60, 60], vec![0]];
    assert_eq!(ids(SamplingOptions { bad_words, ..greedy.clone() }, &[50]), [1]);
    let logit_bias = [(70, 52.0)].into();
    let presence_penalty = 1.5;
    let sampling = SamplingOptions { logit_bias, presence_penalty, ..greedy.clone() };
    assert_eq!(ids(sampling, &[50]), [70, 70, 70]);
    let logit_bias = [(70, 49.0)].into();
    let sampling = SamplingOptions { logit_bias, presence_penalty, ..greedy.clone() };
    assert_eq!(ids(sampling, &[60]), [60, 70, 60]);
    let logit_bias = [(70, 49.0)].into();
    let sampling = SamplingOptions { logit_bias, repetition_penalty: 1.1, ..greedy };
    assert_eq!(ids(sampling, &[60]), [70, 60, 60]);
}

#[test]
fn bad_words_are_spelled_with_and_without_a_space() {
    let tokenizer = tokenizer();
    let words = tokenizer.bad_word("the").unwrap();
    let texts: Vec<String> = words.iter().map(|word| tokenizer.decode(word)).collect();
    assert_eq!(texts, ["the", " the"]);
    // A spelling that ends in the other is not needed.
    for word in ["7", "\n", "the quick", "🦀"] {
        let words = tokenizer.bad_word(word).unwrap();
        assert_eq!(tokenizer.decode(&words[0]), word);
        assert!(words.iter().skip(1).all(|other| !other.ends_with(&words[0])));
    }
    let spelled = tokenizer.bad_word("<|Bot|>").unwrap();
    assert!(spelled.iter().flatten().all(|&id| !tokenizer.is_added(id)));
    assert!(tokenizer.bad_word("").is_err());
}

#[test]
fn every_step_has_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let mut decode = Scripted::new(spec(1, 20, Logits::Last), |id| id + 1);
    let mut prefill = Scripted::new(spec(4, 20, Logits::Last), |id| id + 1);
    let mut stats = StepStats::create(folder.path()).unwrap();
    let mut generator = generator(&mut decode, Some(&mut prefill)).with_step_stats(&mut stats);
    let prompt: Vec<u32> = (100..109).collect();
    generator.generate(&prompt, &up_to(3), &mut go).unwrap();
    drop(generator);
    let (path, summary) = stats.finish().unwrap();
    let lines: Vec<serde_json::Value> = fs_err::read_to_string(path)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    // (tokens, position, whether it was sampled)
    let expected = [(4, 0, false), (4, 4, false), (1, 8, true), (1, 9, true), (1, 10, true)];
    assert_eq!(lines.len(), expected.len() + 1);
    let cache_bytes = spec(1, 20, Logits::Last).cache_bytes();
    for (line, (tokens, position, sampled)) in lines.iter().zip(expected) {
        assert_eq!((&line["tokens"], &line["position"]), (&tokens.into(), &position.into()));
        assert_eq!(line["cache_bytes"], cache_bytes);
        assert!(line[MODEL_FORWARD_MS].as_f64().unwrap() >= 0.0);
        assert_eq!(line.get(MODEL_SAMPLE_MS).is_some(), sampled);
    }
    assert_eq!((summary.steps, summary.tokens), (5, 11));
    let counts: Vec<(&str, usize)> =
        summary.times.iter().map(|(key, times)| (*key, times.count)).collect();
    assert_eq!(counts, [(MODEL_FORWARD_MS, 5), (MODEL_SAMPLE_MS, 3)]);
    assert_eq!(lines[5]["summary"], serde_json::to_value(&summary).unwrap());
}

#[test]
fn options_that_contradict_are_refused() {
    let mut runner = Scripted::new(spec(1, 16, Logits::Last), |id| id + 1);
    let mut generator = generator(&mut runner, None);
    let mut error = |options: GenerateOptions| message(generator.generate(&[5], &options, &mut go));
    let sampling = SamplingOptions { min_tokens: 4, ..SamplingOptions::GREEDY };
    assert_eq!(
        error(GenerateOptions { sampling, ..up_to(3) }),
        "min_tokens is 4, but at most max_tokens, 3, is accepted"
    );
    assert_eq!(
        error(GenerateOptions { stop: vec!["a".into()], ..up_to(3) }),
        "a stop string is \"a\", but without a tokenizer there is no text; use stop_ids"
    );
    assert_eq!(
        error(GenerateOptions { stop_ids: vec![2052], ..up_to(3) }),
        "an id of stop_ids is 2052, but ids below 2052, the size of the vocabulary, are accepted"
    );
    drop(generator);
    assert!(runner.steps.is_empty());
}

#[test]
fn prompts_that_cannot_run_are_refused() {
    let mut runner = Scripted::new(spec(1, 4, Logits::Last), |id| id + 1);
    let mut generator = generator(&mut runner, None);
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
    let options = GenerateOptions { sampling, ..Default::default() };
    assert!(message(generator.generate(&[5], &options, &mut go)).starts_with("top_p is 0"));
    drop(generator);
    assert!(runner.steps.is_empty());
}

#[test]
fn runners_that_do_not_fit_are_refused() {
    let refused = |spec: StepSpec| {
        let mut runner = Scripted::new(spec, |id| id);
        refusal(StepDecoder::new(&config(), Box::new(&mut runner), Box::new(IdEmbedding)))
    };
    assert_eq!(
        refused(spec(2, 8, Logits::Last)),
        "runner scripted: the tokens of a step is 2, but generation needs 1"
    );
    assert_eq!(
        refused(spec(1, 8, Logits::Hidden)),
        "runner scripted: the output is the hidden state, but generation needs logits"
    );
    let one_layer = StepOptions { layers: 1..2, ..StepOptions::decode(&config(), 8) };
    assert_eq!(
        refused(StepSpec::new(&config(), &one_layer).unwrap()),
        "runner scripted: the range of layers is 1..2, but generation needs 0..2"
    );
    let prefill = |spec_of_prefill: StepSpec| {
        let mut decode = Scripted::new(spec(1, 8, Logits::Last), |id| id);
        let mut prefill = Scripted::new(spec_of_prefill, |id| id);
        let decoder =
            StepDecoder::new(&config(), Box::new(&mut decode), Box::new(IdEmbedding)).unwrap();
        refusal(decoder.with_runner(Box::new(&mut prefill)))
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
