use crate::{
    Decoder, Embedding, KvState, Logits, PreparedStep, Role, Runner, RunnerError, StepOutputs,
    StepSpec, Wanted,
};
use firesteel_checkpoint::ModelConfig;

/// A sequence on [`Runner`]s of one model: one that takes a token a step, and any number of others
/// that take more.
pub struct StepDecoder<'a> {
    /// The first one takes one token a step and gives logits.
    stages: Vec<Stage<'a>>,
    embedding: Box<dyn Embedding + 'a>,
    state: KvState,
    pending: Option<Pending>,
    /// Embeddings of the step at hand; reused between steps.
    x: Vec<f32>,
}

/// A runner with its contract.
struct Stage<'a> {
    runner: Box<dyn Runner + 'a>,
    spec: StepSpec,
}

/// A step of a stage that was run and not committed.
struct Pending {
    stage: usize,
    step: PreparedStep,
    outputs: StepOutputs,
}

impl Stage<'_> {
    /// Rows of logits that a step gives.
    fn rows(&self) -> usize {
        match self.spec.logits {
            Logits::Hidden => 0,
            Logits::Last => 1,
            Logits::All => self.spec.tokens,
        }
    }

    fn gives(&self, wanted: Wanted) -> bool {
        match wanted {
            Wanted::Nothing => true,
            Wanted::Last => self.rows() > 0,
            Wanted::All => self.rows() == self.spec.tokens,
        }
    }
}

impl<'a> StepDecoder<'a> {
    /// A decoder on `runner`, which runs all layers of `config` and the head for one token a step.
    ///
    /// # Errors
    /// When the runner's steps are otherwise, or the size of a cache overflows.
    pub fn new(
        config: &ModelConfig,
        runner: Box<dyn Runner + 'a>,
        embedding: Box<dyn Embedding + 'a>,
    ) -> Result<Self, RunnerError> {
        let spec = runner.spec().clone();
        let layers = spec.first_layer..spec.first_layer.saturating_add(spec.layers.len());
        require(&*runner, "the tokens of a step", spec.tokens, 1)?;
        require(&*runner, "the range of layers", layers, 0..config.num_layers())?;
        require(&*runner, "the vocabulary", spec.vocab_size, config.vocab_size)?;
        require(&*runner, "the hidden size", spec.hidden_size, embedding.hidden_size())?;
        if spec.logits == Logits::Hidden {
            return Err(unusable(&*runner, "the output", "the hidden state", "logits"));
        }
        let state = KvState::new(&spec)?;
        let stages = vec![Stage { runner, spec }];
        Ok(Self { stages, embedding, state, pending: None, x: Vec::new() })
    }

    /// Also runs steps on `runner`, which are those of the first runner but for the number of
    /// tokens and the output. One without a head takes tokens whose logits nobody wants.
    ///
    /// # Errors
    /// When its steps do not continue the same caches.
    pub fn with_runner(mut self, runner: Box<dyn Runner + 'a>) -> Result<Self, RunnerError> {
        let spec = runner.spec().clone();
        let first = self.first();
        require(&*runner, "the context", spec.context, first.context)?;
        require(&*runner, "the first layer", spec.first_layer, first.first_layer)?;
        if spec.rope_sliding != first.rope_sliding || spec.rope_full != first.rope_full {
            let expected = "the first runner's";
            return Err(unusable(&*runner, "the rotary embedding", "another", expected));
        }
        if spec.vocab_size != first.vocab_size && spec.logits != Logits::Hidden {
            require(&*runner, "the vocabulary", spec.vocab_size, first.vocab_size)?;
        }
        let expected = first.with_tokens(spec.tokens)?.inputs;
        require(&*runner, "the number of inputs", spec.inputs.len(), expected.len())?;
        for (input, expected) in spec.inputs.iter().zip(&expected) {
            let show = |t: &crate::TensorSpec| format!("{} {} {:?}", t.name, t.dtype, t.shape);
            require(&*runner, "an input", show(input), show(expected))?;
        }
        self.stages.push(Stage { runner, spec });
        Ok(self)
    }

    fn first(&self) -> &StepSpec {
        &self.stages[0].spec
    }

    /// The stage for a forward, that with the fewest rows of logits.
    fn stage(&self, tokens: usize, wanted: Wanted) -> Option<usize> {
        let stages = self.stages.iter().enumerate();
        let fitting = stages.filter(|(_, s)| s.spec.tokens == tokens && s.gives(wanted));
        fitting.min_by_key(|(_, stage)| stage.rows()).map(|(index, _)| index)
    }
}

impl Decoder for StepDecoder<'_> {
    fn name(&self) -> &str {
        self.stages[0].runner.name()
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.stages[0].runner.settings()
    }

    fn vocab_size(&self) -> usize {
        self.first().vocab_size
    }

    fn embedding_rows(&self) -> usize {
        self.embedding.rows()
    }

    fn context(&self) -> usize {
        self.state.context()
    }

    fn position(&self) -> usize {
        self.state.position()
    }

    fn cache_bytes(&self) -> usize {
        self.state.bytes()
    }

    /// The tokens of the longest step that fits; one without a head leaves at least one token.
    fn chunk(&self, left: usize) -> usize {
        let fitting = self.stages.iter().filter(|stage| {
            let headless = usize::from(stage.rows() == 0);
            stage.spec.tokens.saturating_add(headless) <= left
        });
        fitting.map(|stage| stage.spec.tokens).max().unwrap_or(1)
    }

    fn gives_all_logits(&self, tokens: usize) -> bool {
        self.stage(tokens, Wanted::All).is_some()
    }

    fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError> {
        self.pending = None;
        let Some(index) = self.stage(ids.len(), wanted) else {
            let accepted = self.stages.iter().filter(|stage| stage.gives(wanted));
            let accepted: Vec<String> = accepted.map(|s| s.spec.tokens.to_string()).collect();
            let expected = format!("a step of {} for these logits", accepted.join(" or "));
            let actual = ids.len().to_string();
            return Err(unusable(&*self.stages[0].runner, "the tokens", actual, expected));
        };
        let Stage { runner, spec } = &mut self.stages[index];
        self.x.resize(ids.len().saturating_mul(spec.hidden_size), 0.0);
        self.embedding.lookup(ids, &mut self.x)?;
        let step = self.state.prepare(spec, &self.x)?;
        let outputs = runner.step(&self.state.inputs(spec, &step)?)?;
        self.state.check(spec, &step, &outputs)?;
        logits.clear();
        if wanted != Wanted::Nothing
            && let Some(tensor) = outputs.get(spec, Role::Logits)
        {
            let values = tensor.view().to_f32().map_err(crate::StepError::from)?;
            // Of a step that gives all rows, only the last one may be wanted.
            let wanted = if wanted == Wanted::All { values.len() } else { spec.vocab_size };
            logits.extend_from_slice(&values[values.len().saturating_sub(wanted)..]);
        }
        self.pending = Some(Pending { stage: index, step, outputs });
        Ok(())
    }

    fn commit(&mut self, tokens: usize) -> Result<(), RunnerError> {
        match self.pending.take() {
            Some(Pending { stage, step, outputs }) => {
                let spec = &self.stages[stage].spec;
                Ok(self.state.write(spec, step, &outputs, tokens)?)
            }
            None if tokens == 0 => Ok(()),
            None => Err(crate::StepError::PartOfStep { kept: tokens, tokens: 0 }.into()),
        }
    }

    fn clear(&mut self) {
        self.pending = None;
        self.state.clear();
    }

    fn mark(&mut self) {
        self.state.mark();
    }

    fn rewind(&mut self, position: usize) -> usize {
        self.pending = None;
        self.state.rewind(position)
    }
}

fn unusable(
    runner: &dyn Runner,
    what: &'static str,
    actual: impl Into<String>,
    expected: impl Into<String>,
) -> RunnerError {
    RunnerError::Unusable {
        runner: runner.name().into(),
        what,
        actual: actual.into(),
        expected: expected.into(),
    }
}

fn require<T: PartialEq + std::fmt::Debug>(
    runner: &dyn Runner,
    what: &'static str,
    actual: T,
    expected: T,
) -> Result<(), RunnerError> {
    if actual == expected {
        Ok(())
    } else {
        Err(unusable(runner, what, format!("{actual:?}"), format!("{expected:?}")))
    }
}
