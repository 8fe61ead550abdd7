use crate::config::{CONFIG_FILE, read_config};
use crate::family::{FedBy, Feeds, Size, Slot, SlotKind, SlotSpec, layer_name};
use crate::folder::{Found, Tensors, file_in, read_tensors};
use crate::json::shorten;
use crate::mistaken::mistaken_file;
use crate::random::{Amplified, Distribution, Generator, outlier_channels};
use crate::weight::Piece;
use crate::{
    CheckpointError, Family, Gguf, GgufTokenizer, ModelConfig, RandomWeights, Weight, gguf,
};
use firesteel_tensor::{SharedBytes, element_count};
use safetensors::Dtype;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A validated model: config and every weight, mapped from a folder or a GGUF file or generated.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    path: Option<PathBuf>,
    warnings: Vec<String>,
    embedding: Weight,
    final_norm: Weight,
    head: Head,
    layers: Vec<LayerWeights>,
    files: Vec<CheckpointFile>,
    gguf: Option<Gguf>,
    tensor_count: usize,
}

/// Where the output head comes from. The data decide, not `tie_word_embeddings`.
#[derive(Debug, Clone)]
pub enum Head {
    /// The embedding is the head: no head is stored, or an identical one.
    Tied,
    /// A stored head of shape `[vocab_size, hidden_size]` that differs from the embedding.
    Stored(Weight),
}

/// The weights of one layer, one for each slot of the family.
#[derive(Debug, Clone)]
pub struct LayerWeights {
    family: Family,
    /// In the order of the family's slots.
    weights: Vec<Weight>,
}

impl LayerWeights {
    /// The weights with what they are there for, in the order in which a token meets them.
    pub fn iter(&self) -> impl Iterator<Item = (&'static SlotSpec, &Weight)> {
        self.family.slots().iter().zip(&self.weights)
    }

    /// The weights, in the same order.
    pub fn all(&self) -> &[Weight] {
        &self.weights
    }

    /// The weights of a kind, in the same order.
    pub fn of_kind(&self, kind: SlotKind) -> impl Iterator<Item = &Weight> {
        self.iter().filter(move |(spec, _)| spec.kind == kind).map(|(_, weight)| weight)
    }

    /// The matrices that number formats are about.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        self.of_kind(SlotKind::Matrix)
    }

    /// The weight that is there for `slot`; `None` where the family has none.
    pub fn get(&self, slot: Slot) -> Option<&Weight> {
        self.iter().find(|(spec, _)| spec.slot == slot).map(|(_, weight)| weight)
    }

    /// The weight that is there for `slot`.
    ///
    /// # Errors
    /// When the family has none.
    pub fn weight(&self, slot: Slot) -> Result<&Weight, CheckpointError> {
        self.get(slot).ok_or(CheckpointError::NoSlot { family: self.family, slot })
    }

    /// The matrices in groups that are multiplied with the same value, in the order in which a token
    /// meets them.
    pub fn groups(&self) -> Vec<Vec<&Weight>> {
        let mut groups: Vec<(FedBy, Vec<&Weight>)> = Vec::new();
        for (spec, weight) in self.iter().filter(|(spec, _)| spec.kind == SlotKind::Matrix) {
            match groups.last_mut() {
                Some((fed_by, group)) if *fed_by == spec.fed_by => group.push(weight),
                _ => groups.push((spec.fed_by, vec![weight])),
            }
        }
        groups.into_iter().map(|(_, group)| group).collect()
    }
}

/// A file that a checkpoint was read from.
#[derive(Debug, Clone)]
pub struct CheckpointFile {
    /// Name in the folder.
    pub name: String,
    /// All of its bytes.
    pub bytes: SharedBytes,
}

/// Name of the output head, in every family.
const HEAD: &str = "lm_head.weight";
/// How many names an error lists.
const SHOWN: usize = 4;
/// Elements compared at once when a stored head has another type than the embedding.
const COMPARE_BLOCK: usize = 4096;

/// A tensor that the architecture has.
struct Expected {
    name: String,
    shape: Vec<usize>,
    /// The shape in keys of config.json.
    meaning: String,
}

impl Expected {
    fn new(name: String, shape: &[Size], config: &ModelConfig) -> Self {
        let meaning = Size::meanings(shape);
        Self { name, shape: shape.iter().map(|size| size.of(config)).collect(), meaning }
    }

    fn of_slot(spec: &SlotSpec, layer: usize, config: &ModelConfig) -> Self {
        Self::new(spec.name(layer), spec.shape, config)
    }
}

fn table_tensor(name: &str, config: &ModelConfig) -> Expected {
    let shape = vec![config.vocab_size, config.hidden_size];
    Expected { name: name.to_owned(), shape, meaning: "[vocab_size, hidden_size]".into() }
}

fn embedding_tensor(config: &ModelConfig) -> Expected {
    table_tensor(config.family.embedding_name(), config)
}

fn final_norm_tensor(config: &ModelConfig) -> Expected {
    let name = config.family.description().outer.final_norm.hugging_face;
    Expected::new(name.to_owned(), &[Size::Hidden], config)
}

fn head_tensor(config: &ModelConfig) -> Expected {
    table_tensor(HEAD, config)
}

impl Checkpoint {
    /// Name of a head that is stored apart from the embedding.
    pub const HEAD: &str = HEAD;

    /// Path of another file of the checkpoint's folder, such as tokenizer.json, after the same
    /// rules for links as for the weights; `None` when there is none. A GGUF file holds all that
    /// belongs to it, so what lies beside it is never taken.
    ///
    /// # Errors
    /// When it is not a regular file or a link that leaves the folder.
    pub fn side_file(&self, name: &str) -> Result<Option<PathBuf>, CheckpointError> {
        match &self.path {
            Some(folder) if self.gguf.is_none() => file_in(folder, name),
            _ => Ok(None),
        }
    }

    /// Opens a Hugging Face folder (config.json and model.safetensors, or shards with
    /// model.safetensors.index.json) or a GGUF file. Maps the weights without reading them, except
    /// that a stored head is compared with the embedding. Weights of a GGUF file have the names
    /// that they have in a folder.
    ///
    /// # Errors
    /// When anything is missing, malformed, unexpected or of the wrong shape; the message names
    /// file, tensor or key, what was found and what is accepted.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if fs_err::metadata(path)?.is_dir() {
            return Self::open_folder(path);
        }
        if Gguf::is_gguf(path)? {
            return Self::open_gguf(path);
        }
        let mut start = Vec::new();
        if fs_err::metadata(path)?.is_file() {
            fs_err::File::open(path)?.take(512).read_to_end(&mut start)?;
        }
        let other = "neither a folder nor a GGUF file; accepted: the folder that holds \
                     config.json, or a GGUF file";
        let reason = mistaken_file(&start).filter(|_| path.is_file()).unwrap_or(other).into();
        Err(CheckpointError::Path { path: path.into(), reason })
    }

    fn open_folder(dir: &Path) -> Result<Self, CheckpointError> {
        let text = read_config(dir)?;
        let (config, mut warnings) = ModelConfig::from_folder(dir, &text)?;
        let Tensors { by_name, mut files, warnings: tensor_warnings } = read_tensors(dir)?;
        warnings.extend(tensor_warnings);
        let bytes = SharedBytes::new(Arc::new(text));
        files.push(CheckpointFile { name: CONFIG_FILE.into(), bytes });
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Parts { path: dir, config, warnings, by_name, files, gguf: None }.build()
    }

    fn open_gguf(path: &Path) -> Result<Self, CheckpointError> {
        let gguf = Gguf::open(path)?;
        let (config, warnings) = gguf::read_config(&gguf)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let file: Arc<str> = (&*name).into();
        let found = gguf.tensors().iter().map(|tensor| {
            let found = Found {
                file: Arc::clone(&file),
                format: Ok(tensor.format),
                shape: tensor.shape.clone(),
                offset: tensor.offset,
                bytes: tensor.bytes.clone(),
            };
            (tensor.name.clone(), found)
        });
        let by_name = found.collect();
        let files = vec![CheckpointFile { name: name.into_owned(), bytes: gguf.bytes() }];
        Parts { path, config, warnings, by_name, files, gguf: Some(gguf) }.build()
    }

    /// A model of the shape `config` whose weights are made on demand. An element depends on the
    /// seed, the name of its tensor and its index alone. Without `tie_word_embeddings` the head
    /// has weights of its own.
    ///
    /// Reading weights fails when `options.dtype` is not f32, f16 or bf16.
    pub fn random(config: ModelConfig, options: RandomWeights) -> Self {
        let channels = outlier_channels(&config, options);
        let make = |expected: Expected, distribution, amplified| {
            let Expected { name, shape, .. } = expected;
            let columns = shape.last().copied().unwrap_or(1);
            let generator =
                Generator::new(&name, columns, distribution, amplified, &channels, options.seed);
            Weight::random(name, shape, options.dtype, generator)
        };
        let embedding =
            make(embedding_tensor(&config), Distribution::Matrix, Amplified::Columns(16.0));
        // The last norm is plain, so that the massive channels do not decide every logit.
        let final_norm = make(final_norm_tensor(&config), Distribution::Norm, Amplified::Nothing);
        let head = match config.tie_word_embeddings {
            true => Head::Tied,
            false => {
                let head = head_tensor(&config);
                Head::Stored(make(head, Distribution::Matrix, Amplified::Nothing))
            }
        };
        let layers: Vec<_> = (0..config.num_layers())
            .map(|layer| {
                let weight = |spec: &SlotSpec| {
                    let distribution = match spec.kind {
                        SlotKind::Norm => Distribution::Norm,
                        SlotKind::Matrix | SlotKind::SmallMatrix => Distribution::Matrix,
                    };
                    // Massive channels are those of the residual stream.
                    let amplified = match (spec.feeds, spec.shape) {
                        (Feeds::Residual, _) => Amplified::Rows(8.0),
                        (Feeds::Matrices, [Size::Hidden]) => Amplified::Columns(4.0),
                        _ => Amplified::Nothing,
                    };
                    make(Expected::of_slot(spec, layer, &config), distribution, amplified)
                };
                let weights = config.family.slots().iter().map(weight).collect();
                LayerWeights { family: config.family, weights }
            })
            .collect();
        let outer = 2 + usize::from(!config.tie_word_embeddings);
        Self {
            tensor_count: outer + config.family.slots().len() * layers.len(),
            config,
            path: None,
            warnings: Vec::new(),
            embedding,
            final_norm,
            head,
            layers,
            files: Vec::new(),
            gguf: None,
        }
    }

    /// The same model with `weights` in the place of those of the same names. A weight with the
    /// name of the head becomes the head, apart from the embedding. Everything else, such as the
    /// path and the files, still tells where the model came from.
    ///
    /// # Errors
    /// When a weight has a name that the model does not have, or another shape.
    pub fn with_weights(&self, weights: Vec<Weight>) -> Result<Self, CheckpointError> {
        let mut model = Self {
            config: self.config.clone(),
            path: self.path.clone(),
            warnings: self.warnings.clone(),
            embedding: self.embedding.clone(),
            final_norm: self.final_norm.clone(),
            head: self.head.clone(),
            layers: self.layers.clone(),
            files: self.files.clone(),
            gguf: self.gguf.clone(),
            tensor_count: self.tensor_count,
        };
        for weight in weights {
            if weight.name() == HEAD && weight.shape() == model.embedding.shape() {
                model.tensor_count += usize::from(matches!(model.head, Head::Tied));
                model.config.tie_word_embeddings = false;
                model.head = Head::Stored(weight);
                continue;
            }
            match model.place(weight.name()) {
                Some(place) if place.shape() == weight.shape() => *place = weight,
                _ => {
                    let (tensor, shape) = (weight.name().to_owned(), weight.shape().to_vec());
                    return Err(CheckpointError::NoPlace { tensor, shape });
                }
            }
        }
        Ok(model)
    }

    /// Where the weight of that name is, but for the head.
    fn place(&mut self, name: &str) -> Option<&mut Weight> {
        let layers = self.layers.iter_mut().flat_map(|layer| &mut layer.weights);
        [&mut self.embedding, &mut self.final_norm]
            .into_iter()
            .chain(layers)
            .find(|weight| weight.name() == name)
    }

    /// The validated config.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The folder or the GGUF file; `None` for generated weights.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// What is accepted but worth knowing, each with the name of its file.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The token embedding, `[vocab_size, hidden_size]`.
    pub fn embedding(&self) -> &Weight {
        &self.embedding
    }

    /// The norm after the last layer, `[hidden_size]`.
    pub fn final_norm(&self) -> &Weight {
        &self.final_norm
    }

    /// Where the output head comes from.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The output head, `[vocab_size, hidden_size]`: the embedding when tied.
    pub fn head_weight(&self) -> &Weight {
        match &self.head {
            Head::Tied => &self.embedding,
            Head::Stored(head) => head,
        }
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[LayerWeights] {
        &self.layers
    }

    /// config.json and every safetensors file, sorted by name, or the GGUF file; empty for
    /// generated weights.
    pub fn files(&self) -> &[CheckpointFile] {
        &self.files
    }

    /// Number of stored tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensor_count
    }

    /// The GGUF file that the weights are in, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// The tokenizer in the GGUF file, read on each call; `None` for anything but a GGUF file
    /// with a tokenizer.
    ///
    /// # Errors
    /// When the file has a tokenizer that cannot be used.
    pub fn gguf_tokenizer(&self) -> Result<Option<GgufTokenizer>, CheckpointError> {
        self.gguf.as_ref().map_or(Ok(None), GgufTokenizer::of)
    }
}

/// What was read from disk, before the tensors are matched with the config.
struct Parts<'a> {
    path: &'a Path,
    config: ModelConfig,
    warnings: Vec<String>,
    by_name: HashMap<String, Found>,
    files: Vec<CheckpointFile>,
    gguf: Option<Gguf>,
}

impl Parts<'_> {
    fn build(self) -> Result<Checkpoint, CheckpointError> {
        let Self { path, config, mut warnings, by_name, files, gguf } = self;
        let tensor_count = by_name.len();
        let is_gguf = gguf.is_some();
        let family = config.family;
        let mut taker = Taker { path, is_gguf, family, by_name, missing: 0, shown: Vec::new() };
        let embedding = taker.take(embedding_tensor(&config))?;
        let final_norm = taker.take(final_norm_tensor(&config))?;
        let stored_head = match taker.has(HEAD) {
            true => taker.take(head_tensor(&config))?,
            false => None,
        };
        let mut layers = Vec::new();
        for layer in 0..config.num_layers() {
            layers.push(taker.layer(&config, layer)?);
        }
        taker.finish(config.num_layers())?;
        let layers = layers.into_iter().collect::<Option<Vec<_>>>();
        let (Some(embedding), Some(final_norm), Some(layers)) = (embedding, final_norm, layers)
        else {
            return Err(taker.missing());
        };
        let head = match stored_head {
            None if config.tie_word_embeddings => Head::Tied,
            None => return Err(CheckpointError::HeadMissing { folder: path.into() }),
            Some(head) if equal(&head, &embedding)? => Head::Tied,
            Some(head) => {
                if config.tie_word_embeddings {
                    warnings.push(format!(
                        "{}: tie_word_embeddings is true, but a lm_head.weight that differs from \
                         the embedding is stored; the stored one is used",
                        path.join(CONFIG_FILE).display()
                    ));
                }
                Head::Stored(head)
            }
        };
        Ok(Checkpoint {
            config,
            path: Some(path.into()),
            warnings,
            embedding,
            final_norm,
            head,
            layers,
            files,
            gguf,
            tensor_count,
        })
    }
}

/// Takes the expected tensors out of those found, and keeps what is missing.
struct Taker<'a> {
    /// The folder or the GGUF file.
    path: &'a Path,
    is_gguf: bool,
    family: Family,
    /// By the name that the file has for them.
    by_name: HashMap<String, Found>,
    missing: usize,
    shown: Vec<String>,
}

impl Taker<'_> {
    /// The name that the file has for a tensor.
    fn stored_name(&self, name: &str) -> String {
        if self.is_gguf { self.family.gguf_name(name) } else { name.to_owned() }
    }

    /// The path of a file that holds tensors.
    fn file(&self, name: &str) -> PathBuf {
        if self.is_gguf { self.path.into() } else { self.path.join(name) }
    }

    fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(&self.stored_name(name))
    }

    /// The weight of an expected tensor, or `None` and a note that it is missing.
    fn take(&mut self, expected: Expected) -> Result<Option<Weight>, CheckpointError> {
        let Some(piece) = self.take_piece(&expected)? else {
            return Ok(None);
        };
        Ok(Some(Weight::mapped(expected.name, expected.shape, vec![piece])))
    }

    fn take_piece(&mut self, expected: &Expected) -> Result<Option<Piece>, CheckpointError> {
        let name = self.stored_name(&expected.name);
        let Some(Found { file, format, shape, offset, bytes }) = self.by_name.remove(&name) else {
            self.missing += 1;
            if self.shown.len() < SHOWN {
                self.shown.push(name);
            }
            return Ok(None);
        };
        let path = self.file(&file);
        // A GGUF file may leave out leading dimensions of 1.
        let fits = match expected.shape.as_slice() {
            [1, rest @ ..] if self.is_gguf && shape == rest => true,
            all => shape == all,
        };
        if !fits {
            return Err(CheckpointError::Shape {
                file: path,
                tensor: name,
                actual: shape,
                expected: expected.shape.clone(),
                meaning: expected.meaning.as_str().into(),
            });
        }
        match format {
            Ok(format) => Ok(Some(Piece { file, offset, format, bytes })),
            Err(dtype) => {
                let hint = match dtype {
                    Dtype::F64 => "; save the checkpoint in one of these",
                    _ => "; quantized checkpoints are not read, use the float release",
                };
                let dtype = dtype.to_string();
                Err(CheckpointError::DType { file: path, tensor: name, dtype, hint })
            }
        }
    }

    fn layer(
        &mut self,
        config: &ModelConfig,
        layer: usize,
    ) -> Result<Option<LayerWeights>, CheckpointError> {
        let mut weights = Vec::new();
        for spec in self.family.slots() {
            let expected = Expected::of_slot(spec, layer, config);
            if spec.slot == Slot::HeadGate {
                self.check_gate_rows(layer, &expected)?;
            }
            weights.push(self.slot(config, layer, spec, expected)?);
        }
        let weights = weights.into_iter().collect::<Option<Vec<_>>>();
        Ok(weights.map(|weights| LayerWeights { family: self.family, weights }))
    }

    /// The weight of a slot, stored as one tensor or in its pieces.
    fn slot(
        &mut self,
        config: &ModelConfig,
        layer: usize,
        spec: &SlotSpec,
        expected: Expected,
    ) -> Result<Option<Weight>, CheckpointError> {
        let names: Vec<String> =
            spec.pieces.iter().map(|piece| layer_name(layer, piece.hugging_face)).collect();
        let separate = names.iter().find(|name| !self.is_gguf && self.has(name)).cloned();
        let Some(separate) = separate else {
            return self.take(expected);
        };
        if self.has(&expected.name) {
            return Err(CheckpointError::FusedAndSeparate {
                folder: self.path.into(),
                layer,
                fused: format!("{}.weight", spec.names.hugging_face),
                separate,
            });
        }
        let columns = spec.shape.last().copied().unwrap_or(Size::Hidden);
        let mut pieces = Vec::new();
        for (name, piece) in names.into_iter().zip(spec.pieces) {
            pieces.push(self.take_piece(&Expected::new(name, &[piece.rows, columns], config))?);
        }
        let pieces = pieces.into_iter().collect::<Option<Vec<_>>>();
        Ok(pieces.map(|pieces| Weight::mapped(expected.name, expected.shape, pieces)))
    }

    fn check_gate_rows(&self, layer: usize, expected: &Expected) -> Result<(), CheckpointError> {
        let name = self.stored_name(&expected.name);
        let (Some(found), Some(&heads)) = (self.by_name.get(&name), expected.shape.first()) else {
            return Ok(());
        };
        match *found.shape.as_slice() {
            [rows, _] if rows != heads => Err(CheckpointError::GateRows {
                file: self.file(&found.file),
                layer,
                tensor: name,
                rows,
                heads,
            }),
            _ => Ok(()),
        }
    }

    /// Refuses what is missing and what is left.
    fn finish(&mut self, layers: usize) -> Result<(), CheckpointError> {
        if self.missing > 0 {
            return Err(self.missing());
        }
        let Some(first) = self.by_name.keys().min() else {
            return Ok(());
        };
        Err(CheckpointError::Unexpected {
            folder: self.path.into(),
            count: self.by_name.len(),
            shown: self.left(),
            reason: meaning_of_unexpected(first, layers, self.family),
        })
    }

    fn missing(&self) -> CheckpointError {
        let more = if self.missing > self.shown.len() { ", …" } else { "" };
        let unexpected = match self.left() {
            left if left.is_empty() => left,
            left => format!("; unexpected ({}): {left}", self.by_name.len()),
        };
        CheckpointError::Missing {
            folder: self.path.into(),
            count: self.missing,
            shown: format!("{}{more}", self.shown.join(", ")),
            unexpected,
        }
    }

    /// The first names that are left.
    fn left(&self) -> String {
        let mut names: Vec<_> = self.by_name.keys().collect();
        names.sort_unstable();
        let more = if names.len() > SHOWN { ", …" } else { "" };
        let shown: Vec<_> = names.iter().take(SHOWN).map(|name| shorten(name)).collect();
        format!("{}{more}", shown.join(", "))
    }
}

/// What a tensor that the architecture does not have tells about the checkpoint.
fn meaning_of_unexpected(name: &str, layers: usize, family: Family) -> String {
    let layer = name
        .strip_prefix("model.layers.")
        .or_else(|| name.strip_prefix("blk."))
        .and_then(|rest| rest.split('.').next())
        .and_then(|number| number.parse::<usize>().ok());
    match layer {
        Some(layer) if layer >= layers => format!(
            "layer {layer} is beyond num_hidden_layers {layers}; accepted: config and weights of \
             the same model"
        ),
        _ if name.contains("scale") || name.contains("qweight") || name.contains("zero") => {
            "it means a quantized checkpoint; accepted: the float release".into()
        }
        _ if name.contains("lora_") => {
            "it means an adapter; accepted: a checkpoint with the adapter merged".into()
        }
        _ => format!(
            "it means another architecture than {}; accepted: exactly the tensors of this one",
            family.model_type()
        ),
    }
}

/// Whether two weights of one shape hold the same values, by bits.
fn equal(a: &Weight, b: &Weight) -> Result<bool, CheckpointError> {
    if a.format() == b.format()
        && let (Some(a), Some(b)) = (a.bytes().or(a.blocks()), b.bytes().or(b.blocks()))
    {
        return Ok(**a == **b);
    }
    let count = element_count(a.shape()).unwrap_or(usize::MAX);
    let (mut left, mut right) = ([0f32; COMPARE_BLOCK], [0f32; COMPARE_BLOCK]);
    for start in (0..count).step_by(COMPARE_BLOCK) {
        let length = COMPARE_BLOCK.min(count - start);
        a.read_f32(start, &mut left[..length])?;
        b.read_f32(start, &mut right[..length])?;
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
        if !left[..length].iter().zip(&right[..length]).all(same) {
            return Ok(false);
        }
    }
    Ok(true)
}
