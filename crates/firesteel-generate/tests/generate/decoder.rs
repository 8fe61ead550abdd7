//! A sequence on the runners of the engine, whose steps are kept in part and taken back.

use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel, Engine, EngineOptions};
use firesteel_step::{
    CacheLayoutChoice, Decoder, Logits, Runner, RunnerError, StepDecoder, StepError, StepOptions,
    StepSpec, Wanted,
};
use firesteel_testing::spark_tiny_path;
use std::sync::Arc;

/// Entries in the ring of a sliding layer of spark-tiny.
const RING: usize = 63;

struct Model {
    checkpoint: Arc<Checkpoint>,
    engine: Engine,
    cpu: Arc<CpuModel>,
}

impl Model {
    fn open() -> Self {
        let checkpoint = Arc::new(Checkpoint::open(&spark_tiny_path()).unwrap());
        let engine = Engine::new(Arc::clone(&checkpoint), EngineOptions::default());
        let cpu = CpuModel::new(Arc::clone(&checkpoint), Some(1)).unwrap();
        Self { checkpoint, engine, cpu }
    }

    fn runner(&self, name: &str, spec: StepSpec) -> Box<dyn Runner> {
        match name {
            "engine" => Box::new(self.engine.runner(spec).unwrap()),
            _ => Box::new(self.cpu.runner(spec).unwrap()),
        }
    }

    /// A decoder of steps of one token, and of each of `lengths` with all logits.
    fn decoder(
        &self,
        name: &str,
        cache_layout: CacheLayoutChoice,
        lengths: &[usize],
    ) -> StepDecoder<'_> {
        let config = self.checkpoint.config();
        let options = StepOptions { cache_layout, ..StepOptions::decode(config, 300) };
        let spec = StepSpec::new(config, &options).unwrap();
        let embedding = CheckpointEmbedding::new(Arc::clone(&self.checkpoint));
        let first = self.runner(name, spec.clone());
        let mut decoder = StepDecoder::new(config, first, Box::new(embedding)).unwrap();
        for &length in lengths {
            let spec = spec.with_tokens(length).unwrap().with_logits(Logits::All).unwrap();
            decoder = decoder.with_runner(self.runner(name, spec)).unwrap();
        }
        decoder
    }
}

/// Some text of `count` ids, another one for each `salt`.
fn text(count: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| (50 + (i * i * 7 + salt * 131 + i * 13) % 1900) as u32).collect()
}

/// Runs and keeps `ids` in the longest steps there are.
fn run(decoder: &mut dyn Decoder, mut ids: &[u32]) {
    let mut logits = Vec::new();
    while !ids.is_empty() {
        let (step, rest) = ids.split_at(decoder.chunk(ids.len()));
        decoder.forward(step, Wanted::Nothing, &mut logits).unwrap();
        decoder.commit(step.len()).unwrap();
        ids = rest;
    }
}

/// The logits of all of `ids`, one token a step.
fn follow(decoder: &mut dyn Decoder, ids: &[u32]) -> Vec<f32> {
    let (mut all, mut logits) = (Vec::new(), Vec::new());
    for id in ids {
        decoder.forward(&[*id], Wanted::Last, &mut logits).unwrap();
        decoder.commit(1).unwrap();
        all.extend_from_slice(&logits);
    }
    all
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn tokens_that_are_not_kept_leave_no_trace() {
    let model = Model::open();
    let next = text(4, 3);
    for name in ["engine", "cpu"] {
        for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
            for start in [0, 55, RING, 2 * RING + 10] {
                for kept in [0, 1, 7, 16] {
                    let about = format!("{name}, {layout:?}, {kept} of 16 at {start}");
                    let step = text(16, 1);
                    let mut other = step[..kept].to_vec();
                    other.extend(text(16 - kept, 2));
                    let lengths: &[usize] = if kept > 1 { &[16, kept] } else { &[16] };
                    let [a, b, c] = [Some(&step), Some(&other), None].map(|step| {
                        let mut decoder = model.decoder(name, layout, lengths);
                        run(&mut decoder, &text(start, 0));
                        let mut logits = Vec::new();
                        match step {
                            Some(step) => {
                                decoder.forward(step, Wanted::All, &mut logits).unwrap();
                                decoder.commit(kept).unwrap();
                                assert_eq!(logits.len(), 16 * decoder.vocab_size());
                            }
                            None => run(&mut decoder, &text(16, 1)[..kept]),
                        }
                        assert_eq!(decoder.position(), start + kept, "{about}");
                        follow(&mut decoder, &next)
                    });
                    assert!(a == b, "{about}");
                    // As if only the kept ones had been run, which adds in another order.
                    assert!(largest_difference(&a, &c) < 1e-4, "{about}");
                }
            }
        }
    }
}

#[test]
fn a_sequence_goes_back_to_its_marks() {
    let model = Model::open();
    let (first, second, next) = (text(200, 0), text(150, 1), text(5, 2));
    for name in ["engine", "cpu"] {
        for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll] {
            for marked in [1, RING, 100] {
                for run_on in [1, RING + 1, 140] {
                    let about = format!("{name}, {layout:?}, {run_on} after {marked}");
                    let mut fresh = model.decoder(name, layout, &[16, 9]);
                    run(&mut fresh, &first[..marked]);
                    let expected = follow(&mut fresh, &next);

                    let mut decoder = model.decoder(name, layout, &[16, 9]);
                    run(&mut decoder, &first[..marked]);
                    decoder.mark();
                    run(&mut decoder, &second[..run_on]);
                    // A step that is pending is forgotten.
                    decoder.forward(&next[..1], Wanted::Nothing, &mut Vec::new()).unwrap();
                    assert_eq!(decoder.rewind(marked), marked, "{about}");
                    assert!(decoder.commit(1).is_err());
                    assert!(follow(&mut decoder, &next) == expected, "{about}");
                    // And once more.
                    assert_eq!(decoder.rewind(marked), marked, "{about}");
                    assert!(follow(&mut decoder, &next) == expected, "{about}");
                }
            }
        }
    }
}

#[test]
fn a_sequence_goes_back_between_marks_that_are_near() {
    let model = Model::open();
    let (first, second, next) = (text(120, 0), text(100, 1), text(5, 2));
    for to in [100, 110, 116] {
        let mut fresh = model.decoder("engine", CacheLayoutChoice::Ring, &[]);
        follow(&mut fresh, &first[..to]);
        let expected = follow(&mut fresh, &next);

        let mut decoder = model.decoder("engine", CacheLayoutChoice::Ring, &[]);
        follow(&mut decoder, &first[..100]);
        decoder.mark();
        follow(&mut decoder, &first[100..116]);
        decoder.mark();
        follow(&mut decoder, &second);
        assert_eq!(decoder.rewind(to), to);
        assert!(follow(&mut decoder, &next) == expected);
    }
    let mut decoder = model.decoder("engine", CacheLayoutChoice::Ring, &[]);
    follow(&mut decoder, &first);
    assert_eq!(decoder.rewind(110), 0, "nothing was marked");
    assert_eq!(decoder.cache_bytes(), 4 * 2 * 2 * 64 * (3 * RING + 300));
}

#[test]
fn steps_that_there_are_not_are_refused() {
    let model = Model::open();
    let mut decoder = model.decoder("cpu", CacheLayoutChoice::Ring, &[4]);
    let mut logits = Vec::new();
    let error = decoder.forward(&[5; 3], Wanted::All, &mut logits).unwrap_err().to_string();
    assert_eq!(
        error,
        "runner cpu: the tokens is 3, but generation needs a step of 1 or 4 for these logits"
    );
    assert!(decoder.gives_all_logits(4) && decoder.gives_all_logits(1));
    assert!(!decoder.gives_all_logits(3));
    assert!(decoder.forward(&[5000], Wanted::Last, &mut logits).is_err());
    decoder.forward(&[5, 6, 7, 8], Wanted::Last, &mut logits).unwrap();
    assert_eq!(logits.len(), decoder.vocab_size());
    let error = decoder.commit(5).unwrap_err();
    let part = StepError::PartOfStep { kept: 5, tokens: 4 };
    assert!(matches!(&error, RunnerError::Step(step) if step.to_string() == part.to_string()));
    assert_eq!(decoder.position(), 0);
}
