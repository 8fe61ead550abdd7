use firesteel_checkpoint::{Checkpoint, Head, LayerWeights, ModelConfig, SlotKind};

/// Number format that all weights of a model are counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightCoding {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element; bf16 has as many.
    F16,
    /// Matrices in 8 bits with an f32 scale a row, gates and norms in 16 bits.
    Int8PerRow,
    /// Matrices in 4 bits with an f32 scale a row, gates and norms in 16 bits.
    Int4PerRow,
}

impl WeightCoding {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Int8PerRow => "int8_per_row",
            Self::Int4PerRow => "int4_per_row",
        }
    }
}

/// Elements and rows of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightCount {
    /// Elements of matrices that quantize.
    matrix: u64,
    /// Rows of those matrices, each of which gets a scale.
    rows: u64,
    /// Elements of norms and gates.
    small: u64,
}

impl WeightCount {
    /// The weights of one layer.
    fn layer(config: &ModelConfig) -> Option<Self> {
        let mut count = Self { matrix: 0, rows: 0, small: 0 };
        for spec in config.family.slots() {
            let shape = spec.shape_in(config);
            let elements = shape
                .iter()
                .try_fold(1u64, |product, size| product.checked_mul(u64::try_from(*size).ok()?))?;
            match spec.kind {
                SlotKind::Matrix => {
                    count.matrix = count.matrix.checked_add(elements)?;
                    count.rows = count.rows.checked_add(*shape.first()? as u64)?;
                }
                SlotKind::SmallMatrix | SlotKind::Norm => {
                    count.small = count.small.checked_add(elements)?;
                }
            }
        }
        Some(count)
    }

    /// The embedding, or the head.
    fn table(config: &ModelConfig) -> Option<Self> {
        let rows = config.vocab_size as u64;
        Some(Self { matrix: rows.checked_mul(config.hidden_size as u64)?, rows, small: 0 })
    }

    fn plus(self, other: Self, times: u64) -> Option<Self> {
        let add = |a: u64, b: u64| b.checked_mul(times).and_then(|b| a.checked_add(b));
        Some(Self {
            matrix: add(self.matrix, other.matrix)?,
            rows: add(self.rows, other.rows)?,
            small: add(self.small, other.small)?,
        })
    }

    /// All weights of a model, with a head beside the embedding or without. `None` when a count of
    /// bytes would not fit in 64 bits.
    pub fn model(config: &ModelConfig, stored_head: bool) -> Option<Self> {
        let norm = Self { matrix: 0, rows: 0, small: config.hidden_size as u64 };
        let model = norm
            .plus(Self::layer(config)?, config.num_layers() as u64)?
            .plus(Self::table(config)?, if stored_head { 2 } else { 1 })?;
        // The largest number that is made of these, by any format.
        model.matrix.checked_add(model.small)?.checked_add(model.rows)?.checked_mul(4)?;
        Some(model)
    }

    /// Number of parameters.
    pub fn parameters(&self) -> u64 {
        self.matrix + self.small
    }

    /// Bytes in a format.
    pub fn bytes(&self, coding: WeightCoding) -> u64 {
        match coding {
            WeightCoding::F32 => 4 * self.parameters(),
            WeightCoding::F16 => 2 * self.parameters(),
            WeightCoding::Int8PerRow => self.matrix + 4 * self.rows + 2 * self.small,
            WeightCoding::Int4PerRow => self.matrix.div_ceil(2) + 4 * self.rows + 2 * self.small,
        }
    }
}

/// Bytes of a model's weights by part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelBytes {
    /// Each layer.
    pub layers: Vec<u64>,
    /// Final norm and head. A tied head is the embedding, which is then counted here alone.
    pub head: u64,
    /// The embedding beside a stored head; else 0.
    pub embedding: u64,
}

impl ModelBytes {
    /// All weights in one format. `None` when a count does not fit in 64 bits.
    pub fn coded(config: &ModelConfig, stored_head: bool, coding: WeightCoding) -> Option<Self> {
        // Bounds every sum below.
        WeightCount::model(config, stored_head)?;
        let table = WeightCount::table(config)?;
        let norm = WeightCount { matrix: 0, rows: 0, small: config.hidden_size as u64 };
        Some(Self {
            layers: vec![WeightCount::layer(config)?.bytes(coding); config.num_layers()],
            head: table.plus(norm, 1)?.bytes(coding),
            embedding: if stored_head { table.bytes(coding) } else { 0 },
        })
    }

    /// The weights as a checkpoint stores them.
    pub fn stored(checkpoint: &Checkpoint) -> Self {
        let embedding = checkpoint.embedding().stored_bytes() as u64;
        let (head, embedding) = match checkpoint.head() {
            Head::Stored(head) => (head.stored_bytes() as u64, embedding),
            Head::Tied => (embedding, 0),
        };
        let layer = |weights: &LayerWeights| {
            weights.all().iter().map(|weight| weight.stored_bytes() as u64).sum()
        };
        Self {
            layers: checkpoint.layers().iter().map(layer).collect(),
            head: head + checkpoint.final_norm().stored_bytes() as u64,
            embedding,
        }
    }

    /// Bytes of all parts.
    pub fn total(&self) -> u64 {
        self.layers.iter().sum::<u64>() + self.head + self.embedding
    }
}
