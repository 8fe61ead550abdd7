use firesteel_step::{
    Decoder, Embedding, KvState, Role, Runner, RunnerError, StepOutputs, StepSpec, Wanted,
};

/// Embeds `ids`, runs them as one step and commits it.
///
/// # Panics
/// When any of it fails.
pub fn advance(
    runner: &mut dyn Runner,
    embedding: &dyn Embedding,
    state: &mut KvState,
    ids: &[u32],
) -> StepOutputs {
    let spec = runner.spec().clone();
    let mut x = vec![0f32; ids.len() * embedding.hidden_size()];
    embedding.lookup(ids, &mut x).unwrap();
    let step = state.prepare(&spec, &x).unwrap();
    let outputs = runner.step(&state.inputs(&spec, &step).unwrap()).unwrap();
    state.commit(&spec, step, &outputs).unwrap();
    outputs
}

/// Values of the output with `role`.
///
/// # Panics
/// When the step has no such output.
pub fn values(outputs: &StepOutputs, spec: &StepSpec, role: Role) -> Vec<f32> {
    outputs.get(spec, role).unwrap().view().to_f32().unwrap().into_owned()
}

type Script<'s> = Box<dyn Fn(&[u32]) -> Vec<f32> + 's>;

/// A decoder without a model: the logits behind a token are a function of the tokens up to it.
pub struct ScriptedDecoder<'s> {
    /// Name in errors and reports.
    pub name: &'static str,
    /// Ids that have an embedding.
    pub embedding_rows: usize,
    /// Tokens that it takes best at once.
    pub chunk: usize,
    /// Tokens of the longest forward with the logits of every one.
    pub most_logits: usize,
    /// The position over which no forward goes.
    pub fails_at: Option<usize>,
    /// What every forward was asked for.
    pub asked: Vec<Wanted>,
    vocabulary: usize,
    context: usize,
    script: Script<'s>,
    ids: Vec<u32>,
    pending: Vec<u32>,
}

impl<'s> ScriptedDecoder<'s> {
    /// Logits of `vocabulary` ids from `script`, which is given all tokens up to one, that one last.
    /// Takes any number of tokens up to `context` and gives the logits of all.
    pub fn new(
        vocabulary: usize,
        context: usize,
        script: impl Fn(&[u32]) -> Vec<f32> + 's,
    ) -> Self {
        Self {
            name: "scripted",
            embedding_rows: vocabulary,
            chunk: usize::MAX,
            most_logits: usize::MAX,
            fails_at: None,
            asked: Vec::new(),
            vocabulary,
            context,
            script: Box::new(script),
            ids: Vec::new(),
            pending: Vec::new(),
        }
    }
}

impl Decoder for ScriptedDecoder<'_> {
    fn name(&self) -> &str {
        self.name
    }

    fn vocab_size(&self) -> usize {
        self.vocabulary
    }

    fn embedding_rows(&self) -> usize {
        self.embedding_rows
    }

    fn context(&self) -> usize {
        self.context
    }

    fn position(&self) -> usize {
        self.ids.len()
    }

    fn cache_bytes(&self) -> usize {
        0
    }

    fn chunk(&self, left: usize) -> usize {
        left.min(self.chunk)
    }

    fn gives_all_logits(&self, tokens: usize) -> bool {
        tokens <= self.most_logits
    }

    /// # Panics
    /// When the caller breaks what the trait asks of it.
    fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError> {
        assert!(!ids.is_empty() && self.ids.len() + ids.len() <= self.context);
        self.asked.push(wanted);
        self.pending.clear();
        logits.clear();
        let positions = self.ids.len()..self.ids.len() + ids.len();
        if self.fails_at.is_some_and(|position| positions.contains(&position)) {
            let message = "it was to fail".to_owned();
            return Err(RunnerError::Failed { runner: self.name.into(), message });
        }
        let rows = match wanted {
            Wanted::Nothing => 0,
            Wanted::Last => 1,
            Wanted::All => {
                assert!(self.gives_all_logits(ids.len()));
                ids.len()
            }
        };
        let all = [self.ids.as_slice(), ids].concat();
        for end in all.len() - rows + 1..=all.len() {
            let row = (self.script)(&all[..end]);
            assert_eq!(row.len(), self.vocabulary);
            logits.extend(row);
        }
        self.pending = ids.to_vec();
        Ok(())
    }

    fn commit(&mut self, tokens: usize) -> Result<(), RunnerError> {
        let pending = std::mem::take(&mut self.pending);
        self.ids.extend_from_slice(&pending[..tokens]);
        Ok(())
    }

    fn clear(&mut self) {
        self.ids.clear();
        self.pending.clear();
    }
}
