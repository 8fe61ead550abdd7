//! Requests together: each comes out as it does alone.

use crate::support::Model;
use firesteel_engine::{CpuBatch, KvFormat, SequenceOptions};
use firesteel_generate::{
    AddedTokens, Batch, Event, Finished, GenerateError, GenerateOptions, Generation, Generator,
    Observer, PromptLookup, Request, SamplingOptions, StepRecord, StopReason, Vocabulary,
};
use firesteel_step::{BatchDecoder, Decoder, SequenceId, TurnTaking};
use firesteel_testing::{Numbers, ScriptedDecoder};
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::open(2));

fn vocabulary() -> Vocabulary<'static> {
    Vocabulary::new(MODEL.checkpoint.config()).with_tokenizer(&MODEL.tokenizer)
}

/// A request of the tests.
#[derive(Clone)]
struct Case {
    prompt: Vec<u32>,
    options: GenerateOptions,
    context: usize,
    kv: KvFormat,
    /// After this many tokens the observer breaks off.
    break_after: Option<usize>,
}

/// Sixteen requests that differ in everything.
fn cases() -> Vec<Case> {
    let golden: Vec<serde_json::Value> =
        serde_json::from_str(include_str!("../data/chat_golden.json")).unwrap();
    let mut prompts: Vec<Vec<u32>> = golden
        .iter()
        .map(|case| serde_json::from_value(case["prompt_ids"].clone()).unwrap())
        .collect();
    for text in [
        "One day a fox came to the sea. The fox saw a boat. ".repeat(4),
        "One night".to_owned(),
        "The old hands used to tell the story of a machine that never made an error.".repeat(6),
    ] {
        prompts.push(MODEL.tokenizer.encode(&text, AddedTokens::AsText).unwrap());
    }
    prompts.push(vec![50]);
    let greedy = SamplingOptions::GREEDY;
    let warm = SamplingOptions { temperature: 0.8, top_p: 0.95, ..greedy.clone() };
    let samplings = [
        greedy.clone(),
        warm.clone(),
        SamplingOptions { temperature: 1.3, top_k: 20, min_tokens: 12, ..greedy.clone() },
        SamplingOptions { repetition_penalty: 1.1, presence_penalty: 0.2, ..warm },
        SamplingOptions { temperature: 3.0, min_p: 0.01, ..greedy },
    ];
    let cases = (0..16).map(|number| {
        let prompt = prompts[number % prompts.len()].clone();
        let mut sampling = samplings[number % samplings.len()].clone();
        if number % 6 == 5 {
            // Until the context is full.
            sampling.min_tokens = 100;
        }
        let context = if number % 6 == 5 { prompt.len() + number } else { 500 };
        Case {
            options: GenerateOptions {
                max_tokens: (number % 6 != 5).then_some(12 + 5 * (number % 7)),
                sampling: SamplingOptions { seed: number as u64 / 3, ..sampling },
                stop: if number % 4 == 1 { vec!["the".into(), ".".into()] } else { Vec::new() },
                stop_ids: if number % 5 == 2 { vec![300, 17] } else { Vec::new() },
                top_logprobs: (number % 3 == 0).then_some(number % 4),
                prompt_lookup: (number % 2 == 0).then(PromptLookup::default),
            },
            context,
            kv: KvFormat::ALL[number % 3],
            break_after: (number % 8 == 7).then_some(9),
            prompt,
        }
    });
    cases.collect()
}

/// Hears what is said of every request, and breaks some off.
#[derive(Default)]
struct Heard {
    text: BTreeMap<SequenceId, String>,
    tokens: BTreeMap<SequenceId, usize>,
    break_after: BTreeMap<SequenceId, usize>,
    /// Of the present pass: each step's sequence, tokens and position.
    steps: Vec<(SequenceId, usize, usize)>,
}

impl Observer for Heard {
    fn event(&mut self, sequence: SequenceId, event: Event<'_>) -> ControlFlow<()> {
        match event {
            Event::Prefill { .. } => {}
            Event::Token { text, .. } => {
                *self.text.entry(sequence).or_default() += text;
                let tokens = self.tokens.entry(sequence).or_default();
                *tokens += 1;
                if self.break_after.get(&sequence) == Some(tokens) {
                    return ControlFlow::Break(());
                }
            }
            Event::Tail { text } => *self.text.entry(sequence).or_default() += text,
        }
        ControlFlow::Continue(())
    }

    fn step(&mut self, sequence: SequenceId, step: &StepRecord<'_>) {
        self.steps.push((sequence, step.tokens, step.position));
    }
}

/// What a request comes to by itself.
fn alone(decoder: Box<dyn Decoder>, case: &Case) -> Generation {
    let config = MODEL.checkpoint.config();
    let generator = Generator::new(config, decoder).unwrap();
    let mut tokens = 0;
    let mut on_event = |event: Event<'_>| {
        tokens += usize::from(matches!(event, Event::Token { .. }));
        match case.break_after == Some(tokens) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let mut generator = generator.with_tokenizer(&MODEL.tokenizer);
    generator.generate(&case.prompt, &case.options, &mut on_event).unwrap()
}

fn same(a: &Generation, b: &Generation, about: &str) {
    assert_eq!(a.ids, b.ids, "{about}");
    assert_eq!(a.text, b.text, "{about}");
    // Shortest decimal digits tell every f32 from every other.
    assert_eq!(format!("{:?}", a.logprobs), format!("{:?}", b.logprobs), "{about}");
    assert_eq!(a.stop, b.stop, "{about}");
    let counts = |stats: firesteel_generate::Stats| {
        let firesteel_generate::Stats { prompt_tokens, generated_tokens, .. } = stats;
        (prompt_tokens, generated_tokens, stats.proposed_tokens, stats.accepted_tokens)
    };
    assert_eq!(counts(a.stats), counts(b.stats), "{about}");
}

/// Makes a batch, with the sequences of some cases that are there from the start.
type Make<'m> = &'m dyn Fn(&[Case]) -> (Batch<'static>, Vec<SequenceId>);

/// Runs `cases` together as a schedule of random numbers has it: they join at any pass, and with
/// `leave` some are cancelled at any pass. Returns those that were not cancelled.
fn together(
    make: Make<'_>,
    cases: &[Case],
    numbers: &mut Numbers,
    leave: bool,
) -> BTreeMap<usize, Result<Generation, Generation>> {
    let (mut batch, sequences) = make(cases);
    let mut heard = Heard::default();
    let mut joins: Vec<(usize, usize)> =
        (0..cases.len()).map(|case| (numbers.below(40), case)).collect();
    joins.sort_unstable();
    let mut joins = joins.into_iter().peekable();
    let (mut numbered, mut results) = (BTreeMap::new(), BTreeMap::new());
    for pass in 0.. {
        while let Some((_, number)) = joins.next_if(|(join, _)| *join <= pass) {
            let case = &cases[number];
            let ready = sequences.get(number).copied();
            let sequence = ready.unwrap_or_else(|| batch.add(case.context).unwrap());
            let request = Request::new(&vocabulary(), &case.prompt, &case.options).unwrap();
            batch.start(sequence, request).unwrap();
            heard.break_after.extend(case.break_after.map(|tokens| (sequence, tokens)));
            numbered.insert(sequence, number);
        }
        if batch.is_idle() && joins.peek().is_none() {
            break;
        }
        if leave && !numbered.is_empty() && numbers.below(12) == 0 {
            let any = numbers.below(numbered.len());
            let (&sequence, &number) = numbered.iter().nth(any).unwrap();
            if let Some(generation) = batch.cancel(sequence) {
                results.insert(number, Err(generation));
                assert!(batch.remove(sequence) && !batch.remove(sequence));
            }
        }
        for Finished { sequence, outcome } in batch.advance(&mut heard) {
            let generation = outcome.unwrap();
            let shown = heard.text.get(&sequence).cloned().unwrap_or_default();
            assert_eq!(generation.text, Some(shown));
            results.insert(numbered[&sequence], Ok(generation));
            assert!(batch.cancel(sequence).is_none());
            assert!(batch.remove(sequence));
        }
    }
    assert_eq!(results.len(), cases.len());
    results
}

/// Runs 1, 2, 5 and 16 of the cases together on several schedules.
fn come_out_as_alone(expected: &[Generation], cases: &[Case], make: Make<'_>) {
    let mut left = 0;
    for (count, schedules) in [(1, 3), (2, 4), (5, 4), (16, 4)] {
        for schedule in 0..schedules {
            let mut numbers = Numbers::new(1000 * count as u64 + schedule);
            let first = numbers.below(cases.len());
            let chosen: Vec<usize> = (first..first + count).map(|n| n % cases.len()).collect();
            let some: Vec<Case> = chosen.iter().map(|number| cases[*number].clone()).collect();
            let results = together(make, &some, &mut numbers, schedule > 1);
            for (index, result) in results {
                let expected = &expected[chosen[index]];
                let about = format!("case {}, {count} together, {schedule}", chosen[index]);
                match result {
                    Ok(generation) => same(&generation, expected, &about),
                    Err(part) => {
                        left += 1;
                        assert_eq!(part.stop, StopReason::Cancelled);
                        assert!(expected.ids.starts_with(&part.ids), "{about}");
                    }
                }
            }
        }
    }
    assert!(left > 3, "{left}");
}

#[test]
fn requests_together_on_the_cpu_come_out_as_alone() {
    let cases = cases();
    let sequence = |case: &Case| SequenceOptions { context: case.context, kv: case.kv };
    let expected: Vec<Generation> = cases
        .iter()
        .map(|case| alone(Box::new(MODEL.cpu.sequence(sequence(case)).unwrap()), case))
        .collect();
    // The cases are as different as they should be.
    let stops: Vec<StopReason> = expected.iter().map(|generation| generation.stop).collect();
    for wanted in [StopReason::MaxTokens, StopReason::ContextFull, StopReason::Cancelled] {
        assert!(stops.contains(&wanted), "{wanted:?}: {stops:?}");
    }
    assert!(stops.iter().any(|stop| matches!(stop, StopReason::StopString(_))), "{stops:?}");
    assert!(expected.iter().map(|generation| generation.stats.accepted_tokens).sum::<usize>() > 0);
    for rows in [64, 7] {
        come_out_as_alone(&expected, &cases, &|cases| {
            let mut decoder = CpuBatch::new(Arc::clone(&MODEL.cpu), KvFormat::F16);
            let sequences = cases.iter().map(|case| decoder.add_with(sequence(case)).unwrap());
            let sequences = sequences.collect();
            (Batch::new(Box::new(decoder)).with_rows(rows), sequences)
        });
    }
}

#[test]
fn requests_that_take_turns_come_out_as_alone() {
    let cases = cases();
    let expected: Vec<Generation> =
        cases.iter().map(|case| alone(Box::new(MODEL.step_decoder(case.context)), case)).collect();
    come_out_as_alone(&expected, &cases, &|_| {
        let decoder = TurnTaking::new(|context| Ok(Box::new(MODEL.step_decoder(context))));
        (Batch::new(Box::new(decoder)), Vec::new())
    });
}

/// A sequence takes one request after the other, and in a session each runs only what is new,
/// whatever the others do.
#[test]
fn sessions_in_a_batch_run_only_what_is_new() {
    let mut decoder = CpuBatch::new(Arc::clone(&MODEL.cpu), KvFormat::F16);
    let sequences = [(); 3].map(|()| decoder.add(600).unwrap());
    let mut batch = Batch::new(Box::new(decoder)).with_prompt_cache();
    let text = |number: usize| {
        let ids: Vec<u32> = cases()[3 + number].prompt.clone();
        ids.into_iter().cycle().take(90 + 40 * number).collect::<Vec<u32>>()
    };
    let options = GenerateOptions { max_tokens: Some(20), ..GenerateOptions::default() };
    let mut prompts = [text(0), text(2), text(3)];
    for round in 0..3 {
        for (sequence, prompt) in sequences.iter().zip(&prompts) {
            let shared = batch.shared(*sequence, prompt);
            assert_eq!(shared, if round == 0 { 0 } else { prompt.len() - 6 });
            let request = Request::new(&vocabulary(), prompt, &options).unwrap();
            batch.start(*sequence, request).unwrap();
            let again = Request::new(&vocabulary(), prompt, &options).unwrap();
            let error = batch.start(*sequence, again).unwrap_err();
            assert!(matches!(error, GenerateError::Busy { .. }), "{error}");
        }
        let mut heard = Heard::default();
        while !batch.is_idle() {
            for Finished { sequence, outcome } in batch.advance(&mut heard) {
                let index = sequences.iter().position(|known| *known == sequence).unwrap();
                let (prompt, generation) = (&mut prompts[index], outcome.unwrap());
                let about = format!("round {round}, sequence {index}");
                let case = Case {
                    prompt: prompt.clone(),
                    options: options.clone(),
                    context: 600,
                    kv: KvFormat::F16,
                    break_after: None,
                };
                let fresh = SequenceOptions { context: 600, kv: KvFormat::F16 };
                let expected = alone(Box::new(MODEL.cpu.sequence(fresh).unwrap()), &case);
                same(&generation, &expected, &about);
                let cached = if round == 0 { 0 } else { prompt.len() - 6 };
                assert_eq!(generation.stats.cached_tokens, cached, "{about}");
                prompt.extend(&generation.ids);
                prompt.extend([9; 5]);
            }
        }
    }
}

/// Ids of a vocabulary of numbers.
const IDS: usize = 32;

/// A decoder that counts on, in steps of eight.
fn counting(fails_at: Option<usize>) -> Box<dyn Decoder> {
    let script = |ids: &[u32]| {
        let next = ids.last().map_or(0, |id| (*id as usize + 1) % IDS);
        (0..IDS).map(|id| if id == next { 9.0 } else { 0.0 }).collect()
    };
    let mut decoder = ScriptedDecoder::new(IDS, 100, script);
    (decoder.chunk, decoder.fails_at) = (8, fails_at);
    Box::new(decoder)
}

/// Requests without text, on decoders of 100 tokens, those after the first failing at some position.
fn numbers(fails_at: &[Option<usize>]) -> (Batch<'static>, Vec<SequenceId>, Vocabulary<'static>) {
    let count = fails_at.len();
    let mut fails_at = VecDeque::from(fails_at.to_vec());
    let mut decoder = TurnTaking::new(move |_| Ok(counting(fails_at.pop_front().flatten())));
    let sequences = (0..count).map(|_| decoder.add(100).unwrap()).collect();
    let config = firesteel_checkpoint::ModelConfig {
        vocab_size: IDS,
        eos_token_ids: Vec::new(),
        ..MODEL.checkpoint.config().clone()
    };
    (Batch::new(Box::new(decoder)), sequences, Vocabulary::new(&config))
}

#[test]
fn a_request_that_fails_ends_no_other() {
    let fails_at = [None, Some(3), None, Some(17), Some(50)];
    let (mut batch, sequences, vocabulary) = numbers(&fails_at);
    let options = GenerateOptions { max_tokens: Some(40), ..GenerateOptions::default() };
    for sequence in &sequences {
        let request = Request::new(&vocabulary, &[4; 10], &options).unwrap();
        batch.start(*sequence, request).unwrap();
    }
    let mut outcomes = BTreeMap::new();
    while !batch.is_idle() {
        let finished = batch.advance(&mut Heard::default());
        outcomes.extend(finished.into_iter().map(|one| (one.sequence, one.outcome)));
    }
    for (sequence, fails) in sequences.iter().zip([false, true, false, true, false]) {
        match &outcomes[sequence] {
            Ok(generation) => {
                let expected: Vec<u32> = (5..45).map(|id| id % IDS as u32).collect();
                assert_eq!((&generation.ids, fails), (&expected, false));
            }
            Err(error) => assert!(fails && error.to_string() == "scripted: it was to fail"),
        }
    }
    // What cannot be run is refused before it joins, and the sequence is free.
    let refused = |batch: &mut Batch<'static>, prompt: &[u32]| {
        let request = Request::new(&vocabulary, prompt, &options);
        let result = request.and_then(|request| batch.start(sequences[0], request));
        result.unwrap_err().to_string()
    };
    assert!(refused(&mut batch, &[]).contains("the prompt is empty"));
    assert!(refused(&mut batch, &[4; 101]).contains("the context holds 100"));
    assert!(refused(&mut batch, &[40]).contains("prompt[0] is id 40"));
    let stranger = Request::new(&self::vocabulary(), &[4], &options).unwrap();
    let error = batch.start(sequences[0], stranger).unwrap_err().to_string();
    assert!(error.contains("the vocabulary is 32, but generation needs 2048"), "{error}");
    let error = batch.add(101).unwrap_err().to_string();
    assert!(error.contains("the context is 100, but generation needs 101 or more"), "{error}");
    assert!(batch.remove(sequences[1]));
    let request = Request::new(&vocabulary, &[4], &options).unwrap();
    let error = batch.start(sequences[1], request).unwrap_err().to_string();
    assert!(error.contains("is not one of the batch"), "{error}");
    let request = Request::new(&vocabulary, &[4], &options).unwrap();
    batch.start(sequences[0], request).unwrap();
    batch.advance(&mut Heard::default());
    assert_eq!(batch.cancel(sequences[0]).unwrap().ids, [5]);
}

#[test]
fn a_pass_is_bounded_and_nobody_waits_for_long() {
    let (batch, sequences, vocabulary) = numbers(&[None; 10]);
    let mut batch = batch.with_rows(4);
    let start = |batch: &mut Batch<'static>, index: usize, prompt: usize, tokens: usize| {
        let options = GenerateOptions { max_tokens: Some(tokens), ..GenerateOptions::default() };
        let request = Request::new(&vocabulary, &vec![4; prompt], &options).unwrap();
        batch.start(sequences[index], request).unwrap();
    };
    // Two long prompts and a short one among requests that generate.
    (0..7).for_each(|index| start(&mut batch, index, 1, 30));
    let mut last_token: BTreeMap<SequenceId, usize> = BTreeMap::new();
    let mut first_token: BTreeMap<SequenceId, usize> = BTreeMap::new();
    let mut pass = 0;
    while !batch.is_idle() {
        if pass == 3 {
            start(&mut batch, 7, 60, 5);
            start(&mut batch, 8, 60, 5);
            start(&mut batch, 9, 2, 5);
        }
        let mut heard = Heard::default();
        batch.advance(&mut heard);
        let prompt_rows = |sequence: &SequenceId, position: usize| {
            let index = sequences.iter().position(|known| known == sequence).unwrap();
            position < [1, 1, 1, 1, 1, 1, 1, 60, 60, 2][index]
        };
        let (mut prompts, mut generated) = (Vec::new(), Vec::new());
        for (sequence, tokens, position) in &heard.steps {
            match prompt_rows(sequence, *position) {
                true => prompts.push(*tokens),
                false => generated.push(*tokens),
            }
        }
        // Steps of this decoder are not cut, and one of 8 tokens is the only one of its kind.
        assert!(prompts.iter().sum::<usize>() <= 4 || prompts == [8], "{prompts:?}");
        assert!(generated.iter().sum::<usize>() <= 4, "{generated:?}");
        for sequence in heard.tokens.keys() {
            first_token.entry(*sequence).or_insert(pass);
            if let Some(before) = last_token.insert(*sequence, pass) {
                // Ten requests, four of them in a pass.
                assert!(pass - before <= 3, "{sequence} waited for {} passes", pass - before);
            }
        }
        pass += 1;
    }
    // The short prompt waits for a step of each long one at most.
    assert!(first_token[&sequences[9]] <= 6, "{first_token:?}");
    assert_eq!(first_token.len(), 10);
}

/// On a decoder that splits freely a long prompt is cut to the rows of a pass.
#[test]
fn a_long_prompt_is_cut_where_that_changes_nothing() {
    let mut decoder = CpuBatch::new(Arc::clone(&MODEL.cpu), KvFormat::F16);
    let sequences = [(); 2].map(|()| decoder.add(300).unwrap());
    let mut batch = Batch::new(Box::new(decoder)).with_rows(10);
    let prompt: Vec<u32> = (100..300).collect();
    for (sequence, prompt, max_tokens) in
        [(sequences[0], &prompt[..1], 30), (sequences[1], &prompt, 1)]
    {
        let options = GenerateOptions {
            max_tokens: Some(max_tokens),
            sampling: SamplingOptions { min_tokens: max_tokens, ..SamplingOptions::GREEDY },
            ..GenerateOptions::default()
        };
        batch.start(sequence, Request::new(&vocabulary(), prompt, &options).unwrap()).unwrap();
    }
    let mut passes = 0;
    let mut tokens = 0;
    while batch.is_running(sequences[1]) {
        let mut heard = Heard::default();
        batch.advance(&mut heard);
        let rows = heard.steps.iter().filter(|(sequence, ..)| *sequence == sequences[1]);
        assert!(rows.map(|(_, tokens, _)| tokens).sum::<usize>() <= 10);
        tokens += heard.tokens.get(&sequences[0]).copied().unwrap_or(0);
        passes += 1;
    }
    assert_eq!((passes, tokens), (21, 21));
}

/// A server makes requests on one thread and runs them on another.
#[test]
fn requests_and_their_engine_go_to_other_threads() {
    fn goes<T: Send>() {}
    goes::<Request<'static>>();
    goes::<Vocabulary<'static>>();
    goes::<Finished>();
    goes::<CpuBatch>();
}
