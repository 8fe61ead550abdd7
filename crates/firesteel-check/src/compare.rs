use crate::{CheckError, LogitsDifference, Snr, SnrMeter, compare_logits, greedy_choice};
use firesteel_step::{KvState, Role, Runner, RunnerError, StepError, StepOutputs, StepSpec};
use firesteel_tensor::TensorView;
use serde::{Deserialize, Serialize};

/// Makes the step's `x` from token ids, in order of the sequence: the embedding, or the layers
/// before a slice.
pub trait Feed {
    /// Rows `[ids.len(), H]` for the next ids of the sequence.
    ///
    /// # Errors
    /// When an id has no row or a runner before the slice fails.
    fn rows(&mut self, ids: &[u32]) -> Result<Vec<f32>, RunnerError>;

    /// Forgets the sequence.
    fn restart(&mut self);
}

/// What to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckOptions {
    /// Most tokens that are teacher-forced; `None` for all.
    pub steps: Option<usize>,
    /// Tokens of the greedy continuation; 0 for none.
    pub greedy: usize,
    /// Prompt tokens before the greedy continuation.
    pub greedy_prompt: usize,
    /// Gap between the reference's two best logits below which a choice is a tie.
    pub tie_margin: f64,
    /// SNR in dB below which a layer or step is bad.
    pub min_snr: f64,
    /// Share of the greedy choices that are no ties which must agree; 0 asks for nothing.
    pub min_greedy: f64,
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckReport {
    /// Name of the reference runner.
    pub reference: String,
    /// Settings of the reference runner.
    pub reference_settings: Vec<(String, String)>,
    /// Name of the runner under test.
    pub test: String,
    /// Settings of the runner under test.
    pub test_settings: Vec<(String, String)>,
    /// Tokens compared with teacher forcing.
    pub tokens: usize,
    /// Tokens of a step.
    pub tokens_per_step: usize,
    /// The bar, in dB.
    pub min_snr: f64,
    /// Share of the greedy choices that must agree.
    #[serde(default)]
    pub min_greedy: f64,
    /// The first output (logits or hidden state) over all steps.
    pub output: Snr,
    /// What the layers add to the hidden state that enters them, over all steps; `None` with a
    /// head. The hidden state itself may be large, and then hides how wrong a layer is.
    pub added: Option<Snr>,
    /// New keys and values over all steps and layers.
    pub entries: Snr,
    /// Agreement of the distributions; `None` without a head.
    pub logits: Option<LogitsReport>,
    /// Greedy continuation; `None` when it was not run.
    pub greedy: Option<GreedyReport>,
    /// Every layer; hidden states are compared where both runners return them.
    pub layers: Vec<LayerReport>,
    /// Every step.
    pub steps: Vec<StepReport>,
    /// The earliest layer of the earliest step below the bar.
    pub first_bad: Option<FirstBad>,
    /// Whether output, entries, every compared layer and the greedy choices reach their bars.
    pub passed: bool,
}

/// Agreement of next-token distributions under teacher forcing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogitsReport {
    /// Tokens whose logits were compared.
    pub tokens: usize,
    /// Of those that are no ties: share with the same best token. `None` when all are ties.
    pub top1: Option<f64>,
    /// Tokens where the reference's two best are closer than the tie margin.
    pub ties: usize,
    /// Mean share of the five best tokens in common.
    pub top5: f64,
    /// Mean KL divergence in nats.
    pub kl_mean: f64,
    /// Largest KL divergence in nats.
    pub kl_max: f64,
    /// Largest log-probability difference over the reference's twenty best tokens.
    pub top20_logprob_max: f64,
}

/// Agreement along the reference's greedy continuation; the runner under test is given the
/// reference's tokens, so that one early difference does not decide the rest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GreedyReport {
    /// Prompt tokens.
    pub prompt_tokens: usize,
    /// Tokens that the reference chose.
    pub tokens: Vec<u32>,
    /// Tokens that both chose, ties left out.
    pub agreed: usize,
    /// Choices closer than the tie margin, left out.
    pub ties: usize,
    /// Index of the first different choice that is no tie.
    pub first_difference: Option<usize>,
}

impl GreedyReport {
    /// Share of the choices that are no ties which both made; 1 when all are ties.
    pub fn share(&self) -> f64 {
        match self.tokens.len().saturating_sub(self.ties) {
            0 => 1.0,
            decided => self.agreed as f64 / decided as f64,
        }
    }
}

/// One layer over all steps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Number in the model.
    pub layer: usize,
    /// Attention kind, as in config.json.
    pub kind: String,
    /// Residual stream after the layer; `None` when a runner does not return it.
    pub hidden: Option<Snr>,
    /// Keys that the layer returned.
    pub keys: Snr,
    /// Values that the layer returned.
    pub values: Snr,
}

/// One step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Position of the step's first token.
    pub position: usize,
    /// The first output.
    pub output: Snr,
    /// The last token's distribution; `None` without a head.
    pub logits: Option<LogitsDifference>,
}

/// Where a comparison first falls below the bar.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FirstBad {
    /// Position of the step's first token.
    pub position: usize,
    /// Name of the output or hidden state.
    pub name: String,
    /// Its ratio.
    pub snr: Snr,
}

/// One side of a comparison: a runner and its caches.
struct Side<'a> {
    runner: &'a mut dyn Runner,
    spec: StepSpec,
    state: KvState,
}

impl<'a> Side<'a> {
    fn new(runner: &'a mut dyn Runner) -> Result<Self, CheckError> {
        let spec = runner.spec().clone();
        let state = KvState::new(&spec)?;
        Ok(Self { runner, spec, state })
    }

    fn step(&mut self, x: &[f32]) -> Result<StepOutputs, CheckError> {
        let position = self.state.position();
        let fail = |runner: &dyn Runner, source: RunnerError| CheckError::Runner {
            runner: runner.name().to_owned(),
            position,
            source,
        };
        let prepared =
            self.state.prepare(&self.spec, x).map_err(|e| fail(&*self.runner, e.into()))?;
        let inputs = self.state.inputs(&self.spec, &prepared)?;
        let outputs = self.runner.step(&inputs).map_err(|e| fail(&*self.runner, e))?;
        if let Some(error) = first_non_finite(&self.spec, &outputs) {
            return Err(fail(&*self.runner, error.into()));
        }
        self.state
            .commit(&self.spec, prepared, &outputs)
            .map_err(|e| fail(&*self.runner, e.into()))?;
        Ok(outputs)
    }
}

/// Place of an output in the order in which the step makes them, so that a cause comes before its
/// effects.
fn order(role: Role) -> usize {
    match role {
        Role::KeyNew(i) => 3 * i,
        Role::ValueNew(i) => 3 * i + 1,
        Role::LayerHidden(i) => 3 * i + 2,
        _ => usize::MAX,
    }
}

/// The earliest output that is not finite.
fn first_non_finite(spec: &StepSpec, outputs: &StepOutputs) -> Option<StepError> {
    let mut declared: Vec<_> = spec.outputs.iter().zip(outputs.tensors()).collect();
    declared.sort_by_key(|(output, _)| order(output.role));
    declared.into_iter().find_map(|(output, tensor)| {
        let index = tensor.view().first_non_finite()?;
        Some(StepError::NonFinite { name: output.name.clone(), index })
    })
}

/// Runs `reference` and `test` on the same tokens and compares everything they return.
///
/// # Errors
/// When the contracts differ in more than element type, the tokens do not fill a step or exceed
/// the context, or a runner fails.
pub fn compare(
    reference: &mut dyn Runner,
    test: &mut dyn Runner,
    feed: &mut dyn Feed,
    ids: &[u32],
    options: &CheckOptions,
) -> Result<CheckReport, CheckError> {
    same_contract(reference, test)?;
    let per_step = reference.spec().tokens;
    let given = options.steps.map_or(ids.len(), |steps| steps.min(ids.len()));
    let count = given.min(reference.spec().context) / per_step * per_step;
    if count == 0 {
        let problem = format!("a step takes {per_step}");
        return Err(CheckError::Tokens { count: given, problem });
    }
    let mut a = Side::new(reference)?;
    let mut b = Side::new(test)?;
    feed.restart();
    let mut tally = Tally::new(&a.spec, options);
    for chunk in ids[..count].chunks(per_step) {
        let position = a.state.position();
        let x = rows(feed, chunk, position)?;
        let (left, right) = (a.step(&x)?, b.step(&x)?);
        tally.add(position, (&a.spec, &left), (&b.spec, &right))?;
        tally.add_hidden(&x, (&a.spec, &left), (&b.spec, &right))?;
    }
    let greedy = greedy(&mut a, &mut b, feed, ids, options)?;
    Ok(tally.report(&a, &b, count, greedy))
}

fn rows(feed: &mut dyn Feed, ids: &[u32], position: usize) -> Result<Vec<f32>, CheckError> {
    feed.rows(ids).map_err(|source| CheckError::Runner { runner: "feed".into(), position, source })
}

fn same_contract(reference: &dyn Runner, test: &dyn Runner) -> Result<(), CheckError> {
    let (r, t) = (reference.spec(), test.spec());
    let layers = |s: &StepSpec| {
        let kinds: Vec<String> =
            s.layers.iter().map(|l| format!("{}:{}", l.kind, l.cache_length)).collect();
        format!("{}.. {}", s.first_layer, kinds.join(" "))
    };
    let values = |s: &StepSpec| {
        [
            ("tokens a step", s.tokens.to_string()),
            ("context", s.context.to_string()),
            ("hidden size", s.hidden_size.to_string()),
            ("vocabulary", s.vocab_size.to_string()),
            ("first output", format!("{:?}", s.logits)),
            ("layers", layers(s)),
        ]
    };
    for ((what, reference_value), (_, test_value)) in values(r).into_iter().zip(values(t)) {
        if reference_value != test_value {
            return Err(CheckError::Contract {
                what,
                reference: reference.name().into(),
                test: test.name().into(),
                reference_value,
                test_value,
            });
        }
    }
    Ok(())
}

/// Reads a tensor as f32.
fn values(view: TensorView<'_>) -> Result<std::borrow::Cow<'_, [f32]>, CheckError> {
    Ok(view.to_f32().map_err(StepError::from)?)
}

/// Everything seen so far.
struct Tally<'a> {
    options: &'a CheckOptions,
    vocabulary: usize,
    output: SnrMeter,
    added: Option<SnrMeter>,
    hidden: Vec<Option<SnrMeter>>,
    keys: Vec<SnrMeter>,
    values: Vec<SnrMeter>,
    differences: Vec<LogitsDifference>,
    steps: Vec<StepReport>,
    first_bad: Option<FirstBad>,
}

impl<'a> Tally<'a> {
    fn new(spec: &StepSpec, options: &'a CheckOptions) -> Self {
        let layers = spec.layers.len();
        Self {
            options,
            vocabulary: spec.vocab_size,
            output: SnrMeter::default(),
            added: None,
            hidden: vec![None; layers],
            keys: vec![SnrMeter::default(); layers],
            values: vec![SnrMeter::default(); layers],
            differences: Vec::new(),
            steps: Vec::new(),
            first_bad: None,
        }
    }

    fn add(
        &mut self,
        position: usize,
        (spec, reference): (&StepSpec, &StepOutputs),
        (test_spec, test): (&StepSpec, &StepOutputs),
    ) -> Result<(), CheckError> {
        // Layer by layer first, so that the earliest cause is found before its effects.
        let mut meters: Vec<(usize, String, Role, SnrMeter)> = Vec::new();
        for (output, left) in spec.outputs.iter().zip(reference.tensors()) {
            let Some(right) = test.get(test_spec, output.role) else { continue };
            let mut meter = SnrMeter::default();
            meter.add(&values(left.view())?, &values(right.view())?);
            let name = match output.role {
                Role::LayerHidden(i) => format!("layer {}", spec.first_layer + i),
                _ => output.name.clone(),
            };
            meters.push((order(output.role), name, output.role, meter));
        }
        meters.sort_by_key(|(order, ..)| *order);
        let mut step_output = SnrMeter::default();
        for (_, name, role, meter) in meters {
            match role {
                Role::KeyNew(i) => self.keys[i].merge(&meter),
                Role::ValueNew(i) => self.values[i].merge(&meter),
                Role::LayerHidden(i) => {
                    self.hidden[i].get_or_insert_with(SnrMeter::default).merge(&meter);
                }
                _ => step_output = meter,
            }
            let snr = meter.snr();
            if self.first_bad.is_none() && !snr.reaches(self.options.min_snr) {
                self.first_bad = Some(FirstBad { position, name, snr });
            }
        }
        self.output.merge(&step_output);
        let mut last = None;
        if let (Some(left), Some(right)) =
            (reference.get(spec, Role::Logits), test.get(test_spec, Role::Logits))
        {
            let (left, right) = (values(left.view())?, values(right.view())?);
            let width = self.vocabulary;
            for (left, right) in left.chunks_exact(width).zip(right.chunks_exact(width)) {
                let difference = compare_logits(left, right);
                self.differences.push(difference);
                last = Some(difference);
            }
        }
        self.steps.push(StepReport { position, output: step_output.snr(), logits: last });
        Ok(())
    }

    /// Compares what was added to `x`, where the steps end with the hidden state.
    fn add_hidden(
        &mut self,
        x: &[f32],
        (spec, reference): (&StepSpec, &StepOutputs),
        (test_spec, test): (&StepSpec, &StepOutputs),
    ) -> Result<(), CheckError> {
        let hidden = (reference.get(spec, Role::Hidden), test.get(test_spec, Role::Hidden));
        let (Some(left), Some(right)) = hidden else { return Ok(()) };
        let added = |view| -> Result<Vec<f32>, CheckError> {
            Ok(values(view)?.iter().zip(x).map(|(after, before)| after - before).collect())
        };
        let meter = self.added.get_or_insert_with(SnrMeter::default);
        meter.add(&added(left.view())?, &added(right.view())?);
        Ok(())
    }

    fn report(
        self,
        a: &Side<'_>,
        b: &Side<'_>,
        tokens: usize,
        greedy: Option<GreedyReport>,
    ) -> CheckReport {
        let mut entries = SnrMeter::default();
        self.keys.iter().chain(&self.values).for_each(|meter| entries.merge(meter));
        let layers: Vec<LayerReport> = (0..self.keys.len())
            .map(|i| LayerReport {
                layer: a.spec.first_layer + i,
                kind: a.spec.layers[i].kind.to_string(),
                hidden: self.hidden[i].map(|meter| meter.snr()),
                keys: self.keys[i].snr(),
                values: self.values[i].snr(),
            })
            .collect();
        let bar = self.options.min_snr;
        let (output, entries) = (self.output.snr(), entries.snr());
        let passed = output.reaches(bar)
            && entries.reaches(bar)
            && layers.iter().filter_map(|layer| layer.hidden).all(|snr| snr.reaches(bar))
            && greedy.as_ref().map_or(0.0, GreedyReport::share) >= self.options.min_greedy;
        CheckReport {
            reference: a.runner.name().into(),
            reference_settings: a.runner.settings(),
            test: b.runner.name().into(),
            test_settings: b.runner.settings(),
            tokens,
            tokens_per_step: a.spec.tokens,
            min_snr: bar,
            min_greedy: self.options.min_greedy,
            output,
            added: self.added.map(|meter| meter.snr()),
            entries,
            logits: LogitsReport::of(&self.differences, self.options.tie_margin),
            greedy,
            layers,
            steps: self.steps,
            first_bad: self.first_bad,
            passed,
        }
    }
}

impl LogitsReport {
    /// The agreement of some tokens, of which those whose two best are closer than `margin` are
    /// ties; `None` of none.
    pub fn of(differences: &[LogitsDifference], margin: f64) -> Option<Self> {
        if differences.is_empty() {
            return None;
        }
        let count = differences.len();
        let decided = differences.iter().filter(|d| d.reference_gap >= margin);
        let same = decided.clone().filter(|d| d.reference_top == d.test_top).count();
        let decided = decided.count();
        let mean =
            |f: fn(&LogitsDifference) -> f64| differences.iter().map(f).sum::<f64>() / count as f64;
        let largest =
            |f: fn(&LogitsDifference) -> f64| differences.iter().map(f).fold(0.0, f64::max);
        Some(Self {
            tokens: count,
            top1: (decided > 0).then(|| same as f64 / decided as f64),
            ties: count - decided,
            top5: mean(|d| d.top5),
            kl_mean: mean(|d| d.kl),
            kl_max: largest(|d| d.kl),
            top20_logprob_max: largest(|d| d.top20_logprob),
        })
    }
}

/// Continues a prompt greedily on the reference and follows with the test.
fn greedy(
    a: &mut Side<'_>,
    b: &mut Side<'_>,
    feed: &mut dyn Feed,
    ids: &[u32],
    options: &CheckOptions,
) -> Result<Option<GreedyReport>, CheckError> {
    let has_logits = a.spec.outputs.iter().any(|t| t.role == Role::Logits);
    if options.greedy == 0 || a.spec.tokens != 1 || !has_logits || a.spec.first_layer != 0 {
        return Ok(None);
    }
    // Half the context is for going on.
    let longest = ids.len().min(a.spec.context.div_ceil(2));
    let prompt = &ids[..options.greedy_prompt.clamp(1, longest)];
    let room = a.spec.context - prompt.len();
    if room == 0 {
        return Ok(None);
    }
    a.state.clear();
    b.state.clear();
    feed.restart();
    let mut report = GreedyReport {
        prompt_tokens: prompt.len(),
        tokens: Vec::new(),
        agreed: 0,
        ties: 0,
        first_difference: None,
    };
    let mut next = prompt.to_vec();
    while report.tokens.len() < options.greedy.min(room) {
        let mut last = None;
        for id in next.drain(..) {
            let x = rows(feed, &[id], a.state.position())?;
            last = Some((a.step(&x)?, b.step(&x)?));
        }
        let Some((left, right)) = last else { break };
        let (Some(left), Some(right)) =
            (left.get(&a.spec, Role::Logits), right.get(&b.spec, Role::Logits))
        else {
            break;
        };
        let (left, right) = (values(left.view())?, values(right.view())?);
        let difference = compare_logits(&left, &right);
        let Some(choice) = greedy_choice(&left) else { break };
        if difference.reference_gap < options.tie_margin {
            report.ties += 1;
        } else if difference.test_top == choice {
            report.agreed += 1;
        } else if report.first_difference.is_none() {
            report.first_difference = Some(report.tokens.len());
        }
        report.tokens.push(choice);
        next.push(choice);
    }
    Ok(Some(report))
}
