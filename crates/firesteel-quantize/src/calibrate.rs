use crate::names::{LOGITS, range_key};
use crate::weights::Importance;
use crate::{ChannelPeak, Method, QuantizeError, RangeObserver, TensorRange};
use firesteel_graph::{Evaluator, Graph, Op, ValueId};
use firesteel_step::{Embedding, KvState, Role, StepOutputs, StepSpec};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Channels that a range lists.
const PEAKS: usize = 8;

/// Makes the graph and the contract of a step of so many tokens.
pub type MakeStep<'a> = &'a dyn Fn(usize) -> Result<(Graph, StepSpec), QuantizeError>;

/// Runs a step's graph over token sequences and watches its values.
///
/// The graph evaluator runs it: it is there on every machine, computes in f64 and gives the same
/// ranges on any number of threads, which a runtime's own sums do not.
pub struct Calibrator<'a> {
    make: MakeStep<'a>,
    embedding: &'a dyn Embedding,
    /// Tokens of a step.
    chunk: usize,
    stages: HashMap<usize, Stage>,
    observers: BTreeMap<String, RangeObserver>,
    /// Names of the values that matrices are multiplied with.
    multiplied: BTreeSet<String>,
    /// Names of the values that norms square.
    squared: BTreeSet<String>,
    tokens: u64,
}

struct Stage {
    evaluator: Evaluator,
    spec: StepSpec,
    watched: HashMap<ValueId, Watched>,
}

/// What is seen of a value.
struct Watched {
    key: String,
    width: usize,
    channels: usize,
    floor: f64,
}

impl<'a> Calibrator<'a> {
    /// Steps of `chunk` tokens, and of as many as are left at the end of a sequence.
    pub fn new(make: MakeStep<'a>, embedding: &'a dyn Embedding, chunk: usize) -> Self {
        Self {
            make,
            embedding,
            chunk: chunk.max(1),
            stages: HashMap::new(),
            observers: BTreeMap::new(),
            multiplied: BTreeSet::new(),
            squared: BTreeSet::new(),
            tokens: 0,
        }
    }

    /// Runs `ids` from empty caches. `progress` is told the tokens done so far.
    ///
    /// # Errors
    /// When a step cannot be made or run, an id has no embedding, or the sequence is longer than
    /// the context.
    pub fn run(&mut self, ids: &[u32], progress: &mut dyn FnMut(u64)) -> Result<(), QuantizeError> {
        let mut state: Option<KvState> = None;
        for part in ids.chunks(self.chunk) {
            let stage = match self.stages.entry(part.len()) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => {
                    let (graph, spec) = (self.make)(part.len())?;
                    let watched = watched(&graph, &spec);
                    for node in graph.nodes() {
                        let names = match node.op {
                            Op::Gemm => &mut self.multiplied,
                            Op::RmsNormalization { .. } => &mut self.squared,
                            _ => continue,
                        };
                        names.insert(range_key(&graph, node.inputs[0], &spec));
                    }
                    entry.insert(Stage { evaluator: Evaluator::new(graph)?, spec, watched })
                }
            };
            let spec = &stage.spec;
            let state = match &mut state {
                Some(state) => state,
                None => state.insert(KvState::new(spec)?),
            };
            let mut x = vec![0.0; part.len() * self.embedding.hidden_size()];
            self.embedding.lookup(part, &mut x)?;
            let step = state.prepare(spec, &x)?;
            let inputs = state.inputs(spec, &step)?;
            let mut tap = |id: ValueId, values: &[f64]| {
                if let Some(Watched { key, width, channels, floor }) = stage.watched.get(&id) {
                    let observer = self.observers.entry(key.clone());
                    let observer = observer.or_insert_with(|| RangeObserver::new(*channels));
                    observer.add(values, *width, *floor);
                }
            };
            let outputs = stage.evaluator.run_tapped(inputs.tensors(), &mut tap)?;
            let outputs = StepOutputs::new(spec, outputs)?;
            state.commit(spec, step, &outputs)?;
            self.tokens += part.len() as u64;
            progress(self.tokens);
        }
        Ok(())
    }

    /// Tokens that were run.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The mean square of each column of what matrices are multiplied with, by the name of that
    /// value, to three digits.
    pub fn importance(&self) -> Importance {
        let multiplied = self.observers.iter().filter(|(name, _)| self.multiplied.contains(*name));
        let squares = multiplied.map(|(name, observer)| {
            let squares = observer.channel_squares();
            let rows = observer.count() / squares.len().max(1) as u64;
            let mean = |sum: &f64| three_digits(sum / rows.max(1) as f64);
            (name.clone(), squares.iter().map(mean).collect())
        });
        squares.collect()
    }

    /// Names of the values that norms square.
    pub fn squared(&self) -> &BTreeSet<String> {
        &self.squared
    }

    /// The ranges that `method` chooses.
    ///
    /// # Errors
    /// When a value was not finite.
    pub fn ranges(&self, method: Method) -> Result<BTreeMap<String, TensorRange>, QuantizeError> {
        let mut ranges = BTreeMap::new();
        for (name, observer) in &self.observers {
            if !observer.finite() {
                return Err(QuantizeError::NonFinite { name: name.clone() });
            }
            let Some([min, max]) = observer.extremes() else { continue };
            let mut peaks: Vec<(u64, f32)> =
                (0..).zip(observer.channels().iter().copied()).collect();
            peaks.sort_by(|a, b| b.1.total_cmp(&a.1));
            let median = peaks.get(peaks.len() / 2).map_or(0.0, |(_, magnitude)| *magnitude);
            let peaks = peaks.into_iter().take(PEAKS);
            let peaks = peaks
                .map(|(channel, magnitude)| ChannelPeak { channel, magnitude: magnitude.into() });
            ranges.insert(
                name.clone(),
                TensorRange {
                    min,
                    max,
                    count: observer.count(),
                    range8: observer.range(method, 8),
                    range16: observer.range(method, 16),
                    largest_row_square: observer.largest_row_square(),
                    median_channel: median.into(),
                    channels: peaks.collect(),
                },
            );
        }
        Ok(ranges)
    }
}

/// A number whose text is short.
fn three_digits(value: f64) -> f32 {
    format!("{value:.2e}").parse().unwrap_or(value as f32)
}

/// The values that can need a range: what a node computes, the embeddings, and the new entries of
/// the caches. What only moves elements has the range of its input.
fn watched(graph: &Graph, spec: &StepSpec) -> HashMap<ValueId, Watched> {
    let role = |id: ValueId| {
        let name = &graph.value(id).name;
        graph.inputs().contains(&id).then(|| spec.inputs.iter().find(|t| t.name == *name))?
    };
    let is_cache = |id: ValueId| {
        role(id).is_some_and(|t| matches!(t.role, Role::KeyCache(_) | Role::ValueCache(_)))
    };
    let is_mask = |id: ValueId| role(id).is_some_and(|t| matches!(t.role, Role::Mask(_)));
    let mut watched = HashMap::new();
    let mut watch = |id: ValueId, floor: f64, entry: bool| {
        let value = graph.value(id);
        let width = value.shape.last().copied().unwrap_or(1);
        let key = range_key(graph, id, spec);
        let rows = value.shape.len() == 2 && key != LOGITS;
        let channels = match entry {
            // Each head has channels of its own.
            true => spec.num_key_value_heads * width,
            false if rows => width,
            false => 0,
        };
        watched.insert(id, Watched { key, width, channels, floor });
    };
    for id in graph.inputs() {
        if role(*id).is_some_and(|t| t.role == Role::Embedding) {
            watch(*id, f64::NEG_INFINITY, false);
        }
    }
    for node in graph.nodes() {
        if matches!(node.op, Op::Concat { .. }) && node.inputs.iter().any(|id| is_cache(*id)) {
            for entry in node.inputs.iter().filter(|id| !is_cache(**id)) {
                watch(*entry, f64::NEG_INFINITY, true);
            }
        } else if !moves(&node.op) {
            let masked = node.op == Op::Add && node.inputs.iter().any(|id| is_mask(*id));
            let floor = if masked { f64::from(spec.mask_value) / 2.0 } else { f64::NEG_INFINITY };
            watch(node.outputs[0], floor, false);
        }
        if node.op == Op::Gemm {
            // Which columns count may show only after the elements have moved.
            watch(node.inputs[0], f64::NEG_INFINITY, false);
        }
    }
    watched
}

/// Whether an operator's results are elements of its input.
pub(crate) fn moves(op: &Op) -> bool {
    matches!(op, Op::Reshape { .. } | Op::Transpose { .. } | Op::Slice { .. } | Op::Split { .. })
}
