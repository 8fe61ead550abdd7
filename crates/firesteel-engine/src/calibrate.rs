//! What a model's matrices meet while it reads texts.

use crate::engine::Observer;
use crate::{CheckpointEmbedding, Engine, EngineError, EngineOptions};
use firesteel_checkpoint::{Checkpoint, Feeds, Half, Head, SlotKind, Weight};
use firesteel_step::{Embedding, KvState, Logits, Role, StepOptions, StepOutputs, StepSpec};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Tokens of a step: enough that widening the weights costs little.
const CHUNK: usize = 64;

/// Statistics of the matrices' inputs and outputs over texts, for quantizing.
#[derive(Debug, Clone)]
pub struct Calibration {
    tokens: usize,
    matrices: HashMap<String, Moments>,
    residuals: HashMap<String, Geometric>,
}

/// Of one matrix.
#[derive(Debug, Clone, Default)]
struct Moments {
    /// Σ a² of each column's input a.
    squares: Vec<f64>,
    /// Squared length of the output, less its mean: what all logits have in common changes no
    /// probability.
    output: Geometric,
}

/// A geometric mean: a few tokens with very large activations do not decide it.
#[derive(Debug, Clone, Copy, Default)]
struct Geometric {
    sum: f64,
    count: usize,
}

impl Geometric {
    fn add_rows(&mut self, values: &[f64], width: usize, square: fn(&[f64]) -> f64) {
        for row in values.chunks_exact(width.max(1)) {
            let square = square(row);
            if square > 0.0 && square.is_finite() {
                self.sum += square.ln();
                self.count += 1;
            }
        }
    }

    /// 1 when nothing was seen.
    fn mean(&self) -> f64 {
        (self.sum / self.count.max(1) as f64).exp()
    }
}

/// Σ v².
fn length(row: &[f64]) -> f64 {
    row.iter().map(|v| v * v).sum()
}

/// Σ (v − mean)².
fn variation(row: &[f64]) -> f64 {
    let mean = row.iter().sum::<f64>() / row.len().max(1) as f64;
    row.iter().map(|v| (v - mean).powi(2)).sum()
}

impl Observer for Calibration {
    fn product(&mut self, weight: &Weight, input: &[f64], output: &[f64]) {
        let &[rows, columns] = weight.shape() else { return };
        let moments = self.matrices.entry(weight.name().to_owned()).or_default();
        moments.squares.resize(columns, 0.0);
        for row in input.chunks_exact(columns) {
            for (sum, value) in moments.squares.iter_mut().zip(row) {
                *sum += value * value;
            }
        }
        moments.output.add_rows(output, rows, variation);
    }

    fn residual(&mut self, added_by: &Weight, hidden: &[f64], width: usize) {
        let residual = self.residuals.entry(added_by.name().to_owned()).or_default();
        residual.add_rows(hidden, width, length);
    }
}

/// A calibration, and somebody else who looks at what the matrices are multiplied with.
struct Watched<'a> {
    calibration: Calibration,
    inputs: &'a mut dyn FnMut(&Weight, &[f64]),
}

impl Observer for Watched<'_> {
    fn product(&mut self, weight: &Weight, input: &[f64], output: &[f64]) {
        self.calibration.product(weight, input, output);
        (self.inputs)(weight, input);
    }

    fn residual(&mut self, added_by: &Weight, hidden: &[f64], width: usize) {
        self.calibration.residual(added_by, hidden, width);
    }
}

/// Somebody who looks at what the matrices are multiplied with, alone.
struct Inputs<'a>(&'a mut dyn FnMut(&Weight, &[f64]));

impl Observer for Inputs<'_> {
    fn product(&mut self, weight: &Weight, input: &[f64], _: &[f64]) {
        (self.0)(weight, input);
    }

    fn residual(&mut self, _: &Weight, _: &[f64], _: usize) {}
}

/// Layers that read texts.
struct Reading<'a> {
    checkpoint: &'a Arc<Checkpoint>,
    layers: Range<usize>,
    logits: Logits,
}

impl Reading<'_> {
    /// Runs over `x` `[T, H]`, texts of so many tokens, each from an empty cache. `after` is told
    /// the contract and the outputs of every step.
    fn run(
        &self,
        x: &[f32],
        lengths: &[usize],
        observer: &mut dyn Observer,
        after: &mut dyn FnMut(&StepSpec, StepOutputs) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let config = self.checkpoint.config();
        let width = config.hidden_size.max(1);
        let tokens = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
        if tokens.saturating_mul(width) != x.len() {
            let reason = format!("{} values are not {tokens} tokens of {width}", x.len());
            return Err(EngineError::Calibration { reason });
        }
        let mut rest = x;
        for &tokens in lengths.iter().filter(|tokens| **tokens > 0) {
            let (sequence, later) = rest.split_at(tokens * width);
            rest = later;
            let options = StepOptions {
                tokens: CHUNK.min(tokens),
                layers: self.layers.clone(),
                logits: self.logits,
                ..StepOptions::decode(config, tokens)
            };
            let whole = StepSpec::new(config, &options)?;
            let mut state = KvState::new(&whole)?;
            for x in sequence.chunks(CHUNK * width) {
                let spec = whole.with_tokens(x.len() / width)?;
                let engine = Engine::new(Arc::clone(self.checkpoint), EngineOptions::default());
                let runner = engine.runner(spec.clone())?;
                let step = state.prepare(&spec, x)?;
                let inputs = state.inputs(&spec, &step)?;
                let outputs = runner.observed_step(&inputs, observer)?;
                state.commit(&spec, step, &outputs)?;
                after(&spec, outputs)?;
            }
        }
        Ok(())
    }
}

impl Calibration {
    /// Runs `texts` on the reference engine, each from an empty cache. `progress` is told the tokens
    /// done. The result is the same on any number of threads.
    ///
    /// # Errors
    /// When there are no tokens, an id has no embedding, or a weight cannot be read.
    pub fn run(
        checkpoint: &Arc<Checkpoint>,
        texts: &[&[u32]],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, EngineError> {
        Self::run_watched(checkpoint, texts, &mut |_, _| {}, progress)
    }

    /// As [`Calibration::run`], and shows `inputs` every matrix `[N, K]` together with what it is
    /// multiplied with, `[T, K]`, in the order of the texts.
    ///
    /// # Errors
    /// As [`Calibration::run`].
    pub fn run_watched(
        checkpoint: &Arc<Checkpoint>,
        texts: &[&[u32]],
        inputs: &mut dyn FnMut(&Weight, &[f64]),
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, EngineError> {
        let calibration = Self { tokens: 0, matrices: HashMap::new(), residuals: HashMap::new() };
        let mut watched = Watched { calibration, inputs };
        let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
        let (ids, lengths): (Vec<u32>, Vec<usize>) =
            (texts.concat(), texts.iter().map(|text| text.len()).collect());
        let mut x = vec![0.0; ids.len().saturating_mul(embedding.hidden_size())];
        embedding
            .lookup(&ids, &mut x)
            .map_err(|error| EngineError::Calibration { reason: error.to_string() })?;
        let mut done = 0;
        let mut count = |spec: &StepSpec, _: StepOutputs| {
            done += spec.tokens;
            progress(done);
            Ok(())
        };
        let layers = 0..checkpoint.config().num_layers();
        let reading = Reading { checkpoint, layers, logits: Logits::All };
        reading.run(&x, &lengths, &mut watched, &mut count)?;
        let mut calibration = watched.calibration;
        calibration.tokens = ids.len();
        if calibration.tokens == 0 {
            let reason = "the texts have no tokens".into();
            return Err(EngineError::Calibration { reason });
        }
        Ok(calibration)
    }

    /// Runs one layer over `hidden` `[T, H]`, the residual stream before it, of texts of `lengths`
    /// tokens, each from an empty cache. Returns the residual stream after it, and shows `inputs`
    /// every matrix of the layer with what it is multiplied with, in the order of the texts.
    ///
    /// # Errors
    /// When there is no such layer, `hidden` is not as many tokens, or a weight cannot be read.
    pub fn run_layer(
        checkpoint: &Arc<Checkpoint>,
        layer: usize,
        hidden: &[f32],
        lengths: &[usize],
        inputs: &mut dyn FnMut(&Weight, &[f64]),
    ) -> Result<Vec<f32>, EngineError> {
        let mut after = Vec::with_capacity(hidden.len());
        let mut keep = |spec: &StepSpec, outputs: StepOutputs| {
            let hidden = outputs.get(spec, Role::Hidden);
            let hidden = hidden.ok_or(EngineError::Missing { role: Role::Hidden })?;
            after.extend_from_slice(&hidden.view().to_f32()?);
            Ok(())
        };
        let layers = layer..layer.saturating_add(1);
        let mut watched = Inputs(inputs);
        let reading = Reading { checkpoint, layers, logits: Logits::Hidden };
        reading.run(hidden, lengths, &mut watched, &mut keep)?;
        Ok(after)
    }

    /// Tokens that were run.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Mean square of what each column of the matrix of that name is multiplied with; `None` for
    /// a name that was not seen.
    pub fn importance(&self, name: &str) -> Option<Vec<f32>> {
        let squares = &self.matrices.get(name)?.squares;
        Some(squares.iter().map(|sum| (sum / self.tokens.max(1) as f64) as f32).collect())
    }

    /// By matrix: what a unit of mean squared error in its output does, as a share of the squared
    /// length of the residual stream.
    ///
    /// An error of the matrices that add to the stream is one of the stream. An error of the
    /// matrices before them is taken to be the same share of what their block adds as it is of
    /// their output. An error of the logits counts as the same share of the stream.
    pub fn effects(&self, checkpoint: &Checkpoint) -> HashMap<String, f64> {
        let output = |weight: &Weight| {
            self.matrices.get(weight.name()).map_or(1.0, |moments| moments.output.mean())
        };
        let stream =
            |weight: &Weight| self.residuals.get(weight.name()).map_or(1.0, Geometric::mean);
        let mut effects = HashMap::new();
        let mut add = |weight: &Weight, effect: f64| {
            effects.insert(weight.name().to_owned(), effect);
        };
        for layer in checkpoint.layers() {
            for half in Half::ALL {
                let of_half = || {
                    layer.iter().filter(|(spec, _)| {
                        spec.slot.half() == half && spec.kind == SlotKind::Matrix
                    })
                };
                let last = of_half().find(|(spec, _)| spec.feeds == Feeds::Residual);
                let Some((_, last)) = last else { continue };
                for (spec, weight) in of_half() {
                    let effect = match spec.feeds {
                        Feeds::Residual => 1.0 / stream(weight),
                        _ => output(last) / (stream(last) * output(weight)),
                    };
                    add(weight, effect);
                }
            }
        }
        // An error of the table is one of the stream's beginning, and of the logits where the
        // table is the head too.
        let (head, table) = (checkpoint.head_weight(), checkpoint.embedding());
        let rows = table.shape().first().copied().unwrap_or(1) as f64;
        let beginning = 1.0 / (rows * stream(table));
        let of_logits = 1.0 / output(head);
        match checkpoint.head() {
            Head::Stored(_) => {
                add(table, beginning);
                add(head, of_logits);
            }
            _ => {
                // The error is weighted by what the head meets, which the beginning is not.
                let importance = self.importance(head.name()).unwrap_or_default();
                let sum: f64 = importance.iter().copied().map(f64::from).sum();
                let mean = if sum > 0.0 { sum / importance.len() as f64 } else { 1.0 };
                add(head, of_logits + beginning / mean);
            }
        }
        effects
    }
}
