use firesteel_step::{
    Decoder, Embedding, KvState, Logits, PreparedStep, Role, Runner, RunnerError, StepError,
    StepOutputs, StepSpec, Wanted,
};

/// A [`Decoder`] over runners of one model whose steps share a layout: each takes the number of
/// tokens that its own step has, and only all of them can be committed.
pub struct RunnerDecoder {
    /// Largest step first.
    runners: Vec<(Box<dyn Runner>, StepSpec)>,
    embedding: Box<dyn Embedding>,
    state: KvState,
    pending: Option<Pending>,
}

struct Pending {
    runner: usize,
    step: PreparedStep,
    outputs: StepOutputs,
}

impl RunnerDecoder {
    /// A decoder with empty caches. `runners` has at least one.
    ///
    /// # Errors
    /// When there is no runner, or the size of a cache overflows.
    pub fn new(
        runners: Vec<Box<dyn Runner>>,
        embedding: Box<dyn Embedding>,
    ) -> Result<Self, RunnerError> {
        let mut runners: Vec<_> = runners
            .into_iter()
            .map(|runner| {
                let spec = runner.spec().clone();
                (runner, spec)
            })
            .collect();
        runners.sort_by_key(|(_, spec)| std::cmp::Reverse(spec.tokens));
        let Some((_, spec)) = runners.last() else {
            let message = "there is no runner to decode with".into();
            return Err(RunnerError::Failed { runner: "decoder".into(), message });
        };
        let state = KvState::new(spec)?;
        Ok(Self { runners, embedding, state, pending: None })
    }

    fn last(&self) -> Option<&(Box<dyn Runner>, StepSpec)> {
        self.runners.last()
    }

    fn fail(&self, message: String) -> RunnerError {
        RunnerError::Failed { runner: self.name().into(), message }
    }
}

impl Decoder for RunnerDecoder {
    fn name(&self) -> &str {
        self.last().map_or("decoder", |(runner, _)| runner.name())
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.last().map(|(runner, _)| runner.settings()).unwrap_or_default()
    }

    fn vocab_size(&self) -> usize {
        self.last().map_or(0, |(_, spec)| spec.vocab_size)
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

    fn chunk(&self, left: usize) -> usize {
        let mut tokens = self.runners.iter().map(|(_, spec)| spec.tokens);
        tokens.find(|tokens| *tokens <= left).unwrap_or(left)
    }

    fn gives_all_logits(&self, tokens: usize) -> bool {
        let all = |spec: &StepSpec| match spec.logits {
            Logits::All => true,
            Logits::Last => spec.tokens == 1,
            Logits::Hidden => false,
        };
        self.runners.iter().any(|(_, spec)| spec.tokens == tokens && all(spec))
    }

    fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError> {
        self.pending = None;
        logits.clear();
        let runner = self.runners.iter().position(|(_, spec)| spec.tokens == ids.len());
        let Some((index, (runner, spec))) =
            runner.and_then(|index| Some((index, self.runners.get_mut(index)?)))
        else {
            return Err(self.fail(format!("no step takes {} tokens", ids.len())));
        };
        let mut x = vec![0.0; ids.len() * spec.hidden_size];
        self.embedding.lookup(ids, &mut x)?;
        let step = self.state.prepare(spec, &x)?;
        let outputs = runner.step(&self.state.inputs(spec, &step)?)?;
        if wanted != Wanted::Nothing {
            let width = spec.vocab_size;
            let rows = match outputs.get(spec, Role::Logits) {
                Some(tensor) => tensor.view().to_f32().map_err(StepError::from)?,
                None => return Err(self.fail("the step has no logits".into())),
            };
            let needed = if wanted == Wanted::All { ids.len() } else { 1 };
            match rows.len().checked_sub(needed * width) {
                Some(first) => logits.extend_from_slice(&rows[first..]),
                None => return Err(self.fail("the step has the last token's logits only".into())),
            }
        }
        self.pending = Some(Pending { runner: index, step, outputs });
        Ok(())
    }

    fn commit(&mut self, tokens: usize) -> Result<(), RunnerError> {
        match self.pending.take() {
            Some(Pending { runner, step, outputs }) if step.tokens() == tokens => {
                Ok(self.state.commit(&self.runners[runner].1, step, &outputs)?)
            }
            pending => {
                let ready = pending.as_ref().map_or(0, |pending| pending.step.tokens());
                self.pending = pending;
                Err(self.fail(format!("{tokens} of {ready} pending tokens cannot be kept")))
            }
        }
    }

    fn clear(&mut self) {
        self.pending = None;
        self.state.clear();
    }
}
