//! Prompt cache and prompt lookup: neither changes what is generated.

use crate::support::Model;
use firesteel_engine::{KvFormat, SequenceOptions};
use firesteel_generate::{
    AddedTokens, Answer, AnswerOptions, ChatTemplate, Conversation, Event, GenerateOptions,
    Generation, Generator, Message, MessageRole, PromptLookup, SamplingOptions, StepStats, Syntax,
};
use firesteel_testing::{ScriptedDecoder, spark_tiny_path};
use proptest::prelude::*;
use std::ops::ControlFlow;
use std::sync::LazyLock;

/// Keys that a sliding layer of spark-tiny sees.
const WINDOW: usize = 64;

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::open(1));

/// Steps of the trained model.
fn generator() -> Generator<'static> {
    let decoder = Box::new(MODEL.step_decoder(1024));
    let generator = Generator::new(MODEL.checkpoint.config(), decoder).unwrap();
    generator.with_tokenizer(&MODEL.tokenizer)
}

fn go(_: Event<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

const TURNS: [&str; 3] = [
    "Tell me a long story about a fox who lived by the sea and had many friends, and say what she \
     ate, where she slept, and how she came home in the evening when the wind was cold.",
    "And what did the fox say to the old man who sold bread and milk on the market? Tell me all \
     of it, and do not leave out the part about the little boat.",
    "Thank you. What was the name of the boat?",
];

/// Prompts and results of a chat of three turns.
fn chat(
    generator: &mut Generator<'_>,
    options: &GenerateOptions,
    keeps_thoughts: bool,
) -> Vec<(Vec<u32>, Generation)> {
    let template = ChatTemplate::open(&spark_tiny_path()).unwrap();
    let mut conversation = Conversation { add_generation_prompt: true, ..Default::default() };
    let syntax = Syntax::of(MODEL.checkpoint.config().family.model_type()).unwrap();
    let mut turns = Vec::new();
    for text in TURNS {
        conversation.messages.push(Message::text(MessageRole::User, text));
        let prompt = template.encode(&conversation, &MODEL.tokenizer).unwrap();
        let generation = generator.generate(&prompt, options, &mut go).unwrap();
        let options = AnswerOptions { syntax, tools: &[], in_thought: true };
        let text = generation.text.as_ref().unwrap();
        let mut answer = Message::from(Answer::read(text, &options));
        if !keeps_thoughts {
            answer.reasoning_content = None;
        }
        conversation.messages.push(answer);
        turns.push((prompt, generation));
    }
    turns
}

#[test]
fn a_turn_runs_only_what_is_new() {
    let max_tokens = Some(150);
    let warm = SamplingOptions { temperature: 1.0, seed: 3, ..SamplingOptions::GREEDY };
    for sampling in [SamplingOptions::GREEDY, warm] {
        for prompt_lookup in [None, Some(PromptLookup::default())] {
            let options = GenerateOptions {
                max_tokens,
                sampling: sampling.clone(),
                prompt_lookup,
                ..GenerateOptions::default()
            };
            for keeps_thoughts in [true, false] {
                let plain = chat(&mut generator(), &options, keeps_thoughts);
                let cached = chat(&mut generator().with_prompt_cache(), &options, keeps_thoughts);
                let mut before: Vec<u32> = Vec::new();
                for (turn, ((prompt, plain), (_, cached))) in plain.iter().zip(&cached).enumerate()
                {
                    let about = format!("{sampling:?}, {keeps_thoughts}, turn {turn}");
                    assert_eq!(plain.ids, cached.ids, "{about}");
                    assert_eq!(plain.text, cached.text, "{about}");
                    assert_eq!(plain.stats.cached_tokens, 0);
                    let common = shared(&before, prompt);
                    assert_eq!(cached.stats.cached_tokens, common, "{about}");
                    assert_eq!(turn > 0, common > WINDOW, "{about}");
                    // All tokens were run but the last one, which was only picked.
                    before = [prompt.as_slice(), &plain.ids].concat();
                    before.pop();
                }
                let total: usize = plain.iter().map(|(p, g)| p.len() + g.ids.len()).sum();
                assert!(total > 4 * WINDOW, "{total}");
            }
        }
    }
}

/// Whoever says a turn in other words, or has it answered anew, goes back to where it began: none of
/// what was before is run again, though windows have passed since.
#[test]
fn a_turn_that_is_said_again_runs_from_its_beginning() {
    let Model { checkpoint, cpu, tokenizer } = &*MODEL;
    let options = GenerateOptions { max_tokens: Some(30), ..GenerateOptions::default() };
    let encode = |text: &str| MODEL.tokenizer.encode(text, AddedTokens::AsText).unwrap();
    let first = encode(TURNS[0]);
    let own_caches = || {
        let options = SequenceOptions { context: 1024, kv: KvFormat::F16 };
        let decoder = Box::new(cpu.sequence(options).unwrap());
        Generator::new(checkpoint.config(), decoder).unwrap().with_tokenizer(tokenizer)
    };
    let makers: [&dyn Fn() -> Generator<'static>; 2] = [&generator, &own_caches];
    for make in makers {
        let mut session = make().with_prompt_cache();
        let answer = session.generate(&first, &options, &mut go).unwrap();
        let mut turn = [first.as_slice(), &answer.ids].concat();
        let mut ran = turn.len() - 1;
        // The second turn and the third, each said three times.
        for text in [&TURNS[1].repeat(5), &TURNS[0].repeat(4)] {
            let mut last = Vec::new();
            for words in ["", "No: ", "I mean: "] {
                let prompt = [turn.as_slice(), &encode(&format!("{words}{text}"))].concat();
                let result = session.generate(&prompt, &options, &mut go).unwrap();
                assert!(prompt.len() > turn.len() + 2 * WINDOW);
                assert_eq!(result.stats.cached_tokens, ran, "{words:?}");
                let plain = make().generate(&prompt, &options, &mut go).unwrap();
                assert_eq!(result.ids, plain.ids, "{words:?}");
                last = [prompt, result.ids].concat();
            }
            turn = last;
            ran = turn.len() - 1;
        }
    }
}

/// Where a conversation goes on is decided by its tokens: the same prompt again, a shorter one, one
/// that parts early, and one that has nothing in common.
#[test]
fn a_session_takes_any_prompt() {
    let options = GenerateOptions { max_tokens: Some(20), ..GenerateOptions::default() };
    let text = TURNS.concat().repeat(2);
    let text = MODEL.tokenizer.encode(&text, AddedTokens::AsText).unwrap();
    let mut session = generator().with_prompt_cache();
    let parted: Vec<u32> = text[..115].iter().copied().chain([7; 30]).collect();
    let other: Vec<u32> = text.iter().rev().copied().collect();
    // (prompt, tokens from the cache)
    let cases: [(&[u32], usize); 8] = [
        (&text[..120], 0),
        // The last token is run again for its logits.
        (&text[..120], 119),
        (&text[..110], 109),
        // What was generated was right for two tokens, and the ring goes back that far.
        (&text[..120], 112),
        (&parted, 115),
        (&other, 0),
        (&other[..1], 0),
        (&text, 0),
    ];
    for (number, (prompt, cached)) in cases.into_iter().enumerate() {
        let result = session.generate(prompt, &options, &mut go).unwrap();
        assert_eq!(result.stats.cached_tokens, cached, "case {number}");
        let plain = generator().generate(prompt, &options, &mut go).unwrap();
        assert_eq!(result.ids, plain.ids, "case {number}");
    }
    // Breaking off leaves a session that goes on.
    let mut stop = |event: Event<'_>| match event {
        Event::Prefill { done, .. } if done > 40 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    session.generate(&other, &options, &mut stop).unwrap();
    let result = session.generate(&other, &options, &mut go).unwrap();
    assert!(result.stats.cached_tokens > 40);
    assert_eq!(result.ids, generator().generate(&other, &options, &mut go).unwrap().ids);
    // And so does an error.
    assert!(session.generate(&[1, 99_999], &options, &mut go).is_err());
    let again = session.generate(&other, &options, &mut go).unwrap();
    assert_eq!((again.stats.cached_tokens, again.ids), (other.len() - 1, result.ids));
}

/// Conversations with tools, whose answers repeat names and values of the prompt, and a text that
/// repeats itself.
fn prompts() -> Vec<Vec<u32>> {
    let golden: Vec<serde_json::Value> =
        serde_json::from_str(include_str!("../data/chat_golden.json")).unwrap();
    let ids =
        |case: &serde_json::Value| serde_json::from_value(case["prompt_ids"].clone()).unwrap();
    let mut prompts: Vec<Vec<u32>> = golden.iter().map(ids).collect();
    let text = "One day a fox came to the sea. The fox saw a boat. ".repeat(4);
    prompts.push(MODEL.tokenizer.encode(&text, AddedTokens::AsText).unwrap());
    prompts
}

#[test]
fn prompt_lookup_changes_nothing_but_the_steps() {
    let greedy = SamplingOptions::GREEDY;
    let warm = SamplingOptions { temperature: 0.7, top_p: 0.95, ..SamplingOptions::GREEDY };
    let penalties = SamplingOptions {
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        presence_penalty: 0.1,
        ..warm.clone()
    };
    let later = SamplingOptions { min_tokens: 30, top_k: 20, temperature: 1.2, ..greedy.clone() };
    let sets = [
        GenerateOptions { sampling: greedy.clone(), ..Default::default() },
        GenerateOptions { sampling: warm, ..Default::default() },
        GenerateOptions { sampling: penalties, top_logprobs: Some(2), ..Default::default() },
        GenerateOptions { sampling: later, ..Default::default() },
        GenerateOptions {
            sampling: greedy,
            stop: vec!["kobi".into(), "late".into()],
            ..Default::default()
        },
    ];
    let mut accepted = [0; 5];
    for (number, set) in sets.into_iter().enumerate() {
        for prompt in prompts() {
            for seed in [0, 1] {
                let sampling = SamplingOptions { seed, ..set.sampling.clone() };
                let plain = GenerateOptions { max_tokens: Some(60), sampling, ..set.clone() };
                let expected = generator().generate(&prompt, &plain, &mut go).unwrap();
                assert_eq!(expected.stats.proposed_tokens, 0);
                let lookup = PromptLookup { min_ngram: 1, max_ngram: 3, max_tokens: 8 };
                let options = GenerateOptions { prompt_lookup: Some(lookup), ..plain };
                let folder = tempfile::tempdir().unwrap();
                let mut steps = StepStats::create(folder.path()).unwrap();
                let mut shown = String::new();
                let result = generator()
                    .with_step_stats(&mut steps)
                    .generate(&prompt, &options, &mut |event| {
                        if let Event::Token { text, .. } | Event::Tail { text } = event {
                            shown += text;
                        }
                        ControlFlow::Continue(())
                    })
                    .unwrap();
                let about = format!("set {number}, seed {seed}");
                assert_eq!(result.ids, expected.ids, "{about}");
                assert_eq!((&result.text, result.stop), (&expected.text, expected.stop), "{about}");
                assert_eq!(Some(shown), result.text, "{about}");
                let logprobs = |generation: &Generation| generation.logprobs.clone();
                for (a, b) in logprobs(&result)
                    .into_iter()
                    .flatten()
                    .zip(logprobs(&expected).unwrap_or_default())
                {
                    assert_eq!(a.picked.id, b.picked.id, "{about}");
                    assert!((a.picked.logprob - b.picked.logprob).abs() < 1e-4, "{about}");
                }
                let stats = result.stats;
                assert_eq!(stats.decode_steps + stats.accepted_tokens + 1, stats.generated_tokens);
                assert!(stats.accepted_tokens <= stats.proposed_tokens);
                accepted[number] += stats.accepted_tokens;
                let (path, _) = steps.finish().unwrap();
                let lines = std::fs::read_to_string(path).unwrap();
                let sum = |key: &str| -> u64 {
                    let lines = lines.lines().map(serde_json::from_str::<serde_json::Value>);
                    lines.filter_map(|line| line.unwrap()[key].as_u64()).sum()
                };
                assert_eq!(sum("proposed"), stats.proposed_tokens as u64);
                assert_eq!(sum("accepted"), stats.accepted_tokens as u64);
            }
        }
    }
    assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
}

const IDS: usize = 24;

/// Logits that are a function of the last two tokens, so that the text often repeats itself.
fn repetitive(salt: u64, ids: &[u32]) -> Vec<f32> {
    let last = ids.iter().rev().take(2).fold(salt, |hash, &id| {
        (hash ^ u64::from(id)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
    });
    let logit = |id: u64| {
        let hash =
            (last ^ id.wrapping_mul(0xd6e8_feb8_6659_fd93)).wrapping_mul(0xa24b_aed4_963e_e407);
        // Few likely ids, so that a sampled one is likely to come again.
        ((hash >> 40) as f32 / (1 << 24) as f32).powi(4) * 9.0
    };
    (0..IDS as u64).map(logit).collect()
}

fn sampling() -> impl Strategy<Value = SamplingOptions> {
    let numbers = (
        prop_oneof![Just(0.0f32), 0.2f32..1.5],
        prop_oneof![Just(1.0f32), 0.3f32..1.0],
        0usize..6,
        prop_oneof![Just(1.0f32), 0.8f32..1.4],
        prop_oneof![Just(0.0f32), -1.0f32..1.0],
    );
    let rest = (
        prop::collection::vec(prop::collection::vec(0u32..IDS as u32, 1..3), 0..2),
        0usize..8,
        any::<u64>(),
    );
    (numbers, rest).prop_map(|((temperature, top_p, top_k, repetition, frequency), rest)| {
        let (bad_words, min_tokens, seed) = rest;
        SamplingOptions {
            temperature,
            top_p,
            top_k,
            repetition_penalty: repetition,
            frequency_penalty: frequency,
            bad_words,
            min_tokens,
            seed,
            ..SamplingOptions::GREEDY
        }
    })
}

proptest! {
    #[test]
    fn any_proposals_leave_the_output_alone(
        salt in any::<u64>(),
        prompt in prop::collection::vec(0u32..IDS as u32, 1..20),
        context in 20usize..90,
        most in 1usize..12,
        sampling in sampling(),
        max_tokens in prop_oneof![Just(None), (8usize..60).prop_map(Some)],
        stop_ids in prop::collection::vec(0u32..IDS as u32, 0..2),
        min_ngram in 0usize..3,
        max_ngram in 1usize..4,
        lookup_tokens in 1usize..12,
    ) {
        let mut config = MODEL.checkpoint.config().clone();
        config.vocab_size = IDS;
        config.eos_token_ids = vec![3];
        let run = |prompt_lookup| {
            let script = move |ids: &[u32]| repetitive(salt, ids);
            let mut decoder = ScriptedDecoder::new(IDS, context, script);
            (decoder.chunk, decoder.most_logits) = (5, most);
            let mut generator = Generator::new(&config, Box::new(decoder)).unwrap();
            let options = GenerateOptions {
                max_tokens,
                sampling: sampling.clone(),
                stop_ids: stop_ids.clone(),
                top_logprobs: Some(1),
                prompt_lookup,
                ..GenerateOptions::default()
            };
            let mut seen = Vec::new();
            let result = generator.generate(&prompt, &options, &mut |event| {
                if let Event::Token { id, .. } = event {
                    seen.push(id);
                }
                ControlFlow::Continue(())
            });
            // All ids may be forbidden.
            result.inspect(|generation| assert_eq!(seen, generation.ids))
        };
        let lookup = PromptLookup { min_ngram, max_ngram, max_tokens: lookup_tokens };
        match (run(None), run(Some(lookup))) {
            (Ok(expected), Ok(mut result)) => {
                let stats = result.stats;
                prop_assert_eq!(
                    stats.decode_steps + stats.accepted_tokens,
                    expected.stats.decode_steps
                );
                prop_assert!(most > 1 || stats.proposed_tokens == 0);
                result.stats = expected.stats;
                prop_assert_eq!(result, expected);
            }
            (Err(expected), Err(error)) => {
                prop_assert_eq!(error.to_string(), expected.to_string());
            }
            (expected, result) => panic!("{expected:?} {result:?}"),
        }
    }
}

#[test]
fn proposals_are_bounded() {
    let mut generator = generator();
    for max_tokens in [0, 65] {
        let lookup = PromptLookup { max_tokens, ..PromptLookup::default() };
        let options = GenerateOptions { prompt_lookup: Some(lookup), ..Default::default() };
        let error = generator.generate(&[5], &options, &mut go).unwrap_err().to_string();
        let expected = format!("prompt_lookup is {max_tokens}, but 1 to 64 tokens are accepted");
        assert_eq!(error, expected);
    }
}
