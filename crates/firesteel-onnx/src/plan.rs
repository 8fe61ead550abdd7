//! Where the data of every constant goes.

use crate::error::{Fault, OnnxError};
use crate::{DATA_ALIGNMENT, INLINE_LIMIT, MAX_MODEL_BYTES, data, write::model_proto};
use firesteel_graph::{Constant, Graph, ValueId};
use firesteel_tensor::DType;
use prost::Message;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// A model to write.
#[derive(Debug, Clone)]
pub struct ModelFile<'a> {
    /// Bare name of the model file.
    pub name: String,
    /// Bare name of the file for the data of constants that no earlier model of the plan has
    /// placed. Several models may name the same file. A file that gets no data is not written.
    pub data_file: String,
    /// The graph; it needs a name.
    pub graph: &'a Graph,
    /// Operator set, [`crate::MIN_OPSET`] to [`crate::MAX_OPSET`].
    pub opset: i64,
    /// Version of the program that writes; its name is always `firesteel`.
    pub producer_version: String,
    /// Key-value pairs for readers, in order; keys are unique.
    pub metadata: Vec<(String, String)>,
}

/// A data file that holds exactly one constant from byte 0 on, for readers that know no ONNX.
/// Constants of the models that have the same data, or a range of it, refer to this file.
#[derive(Debug, Clone)]
pub struct RawFile {
    /// Bare name of the file.
    pub name: String,
    /// Element type of the data.
    pub dtype: DType,
    /// Shape of the data.
    pub shape: Vec<usize>,
    /// The data. Constants with the key of this source are in this file at offset 0.
    pub data: Constant,
    /// Keys of constants whose data is a part of this file, with the byte at which it starts.
    pub ranges: Vec<(String, u64)>,
}

/// Place of a constant in a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A constant in a data file.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) dtype: DType,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) data: Constant,
}

/// A data file: parts by ascending offset, zeros between them.
pub(crate) struct DataFile {
    pub(crate) name: String,
    pub(crate) length: u64,
    pub(crate) parts: Vec<Part>,
    raw: bool,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFile {
    /// Its bare name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
}

/// A model that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenModel {
    /// The model file, without external data.
    pub file: WrittenFile,
    /// Number of initializers, operator parameters included.
    pub initializers: usize,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteReport {
    /// The models, in the order of the plan.
    pub models: Vec<WrittenModel>,
    /// The data files: raw files first, then in the order of the models that name them.
    pub data: Vec<WrittenFile>,
}

/// Models and where their constants go: small ones (up to [`INLINE_LIMIT`] bytes) into the model
/// file, the others into data files, each at a multiple of [`DATA_ALIGNMENT`] and equal ones (by
/// [`firesteel_graph::ConstantSource::key`]) once for all models. Only the
/// ranges of a raw file are not aligned: they start where their first element is.
pub struct WritePlan<'a> {
    models: Vec<(ModelFile<'a>, HashMap<ValueId, Location>)>,
    files: Vec<DataFile>,
}

impl<'a> WritePlan<'a> {
    /// Places the constants of `models` in order, and those of `raw_files` before them.
    ///
    /// # Errors
    /// When a graph is not valid, a file name is not bare or taken, keys contradict each other, or
    /// a range is not inside its raw file.
    pub fn new(models: Vec<ModelFile<'a>>, raw_files: Vec<RawFile>) -> Result<Self, OnnxError> {
        let mut placement = Placement::default();
        for raw in raw_files {
            placement.add_raw(raw)?;
        }
        let mut placed = Vec::with_capacity(models.len());
        let mut names = HashSet::new();
        for model in models {
            check_name(&model.name)?;
            if !names.insert(model.name.clone()) {
                return Err(plan_error(&model.name, "two models have this name"));
            }
            check_model(&model).map_err(|fault| fault.in_file(&model.name))?;
            let locations = placement.add_model(&model)?;
            placed.push((model, locations));
        }
        let files = placement.files;
        if let Some(file) = files.iter().find(|file| names.contains(&file.name)) {
            return Err(plan_error(&file.name, "a model and a data file have this name"));
        }
        Ok(Self { models: placed, files })
    }

    /// Bytes of constants that the data files hold, without the gaps between them: the number
    /// that the progress of [`WritePlan::write`] reaches.
    pub fn data_bytes(&self) -> u64 {
        let parts = self.files.iter().flat_map(|file| &file.parts);
        parts.fold(0, |sum, part| sum.saturating_add(part.length))
    }

    /// Writes all files into `folder`, which exists and has none of them yet. The bytes depend
    /// on the plan only, not on `threads`, the number of threads that make and write data (1 to
    /// 8; each has a buffer of 512 KiB). `progress` hears the bytes of constants written so far,
    /// from any thread; a late call may carry a smaller number than an earlier one.
    ///
    /// # Errors
    /// When a model does not fit its opset or is too large, a constant's data cannot be made, or
    /// a file cannot be created or written. What was written until then stays.
    pub fn write(
        &self,
        folder: &Path,
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<WriteReport, OnnxError> {
        let mut models = Vec::with_capacity(self.models.len());
        for (model, locations) in &self.models {
            let path = folder.join(&model.name);
            let locate = |id| {
                let location = *locations.get(&id)?;
                Some((self.files.get(location.file)?.name.as_str(), location))
            };
            let proto = model_proto(model, locate).map_err(|fault| fault.in_file(&path))?;
            let bytes = proto.encoded_len() as u64;
            if bytes > MAX_MODEL_BYTES {
                return Err(OnnxError::TooLarge { file: path, bytes, limit: MAX_MODEL_BYTES });
            }
            let mut file = fs_err::File::create_new(&path)?;
            std::io::Write::write_all(&mut file, &proto.encode_to_vec())?;
            models.push(WrittenModel {
                file: WrittenFile { name: model.name.clone(), bytes },
                initializers: proto.graph.map_or(0, |graph| graph.initializer.len()),
            });
        }
        data::write(folder, &self.files, threads, progress)?;
        let written = |file: &DataFile| WrittenFile { name: file.name.clone(), bytes: file.length };
        Ok(WriteReport { models, data: self.files.iter().map(written).collect() })
    }
}

/// Proves what the writer and the readers of a model rely on.
fn check_model(model: &ModelFile<'_>) -> Result<(), Fault> {
    if model.graph.name().is_empty() {
        return Err(Fault::new("graph", "has no name; the format requires one"));
    }
    let mut keys = HashSet::new();
    if let Some((key, _)) = model.metadata.iter().find(|(key, _)| !keys.insert(key)) {
        return Err(Fault::new("metadata", format!("key {key} is given twice")));
    }
    Ok(model.graph.validate()?)
}

fn plan_error(file: &str, problem: impl Into<String>) -> OnnxError {
    OnnxError::Plan { file: file.into(), problem: problem.into() }
}

/// Whether `name` is one plain component: nothing that leaves the folder on any platform.
pub(crate) fn is_bare_name(name: &str) -> bool {
    let forbidden = |c: char| matches!(c, '/' | '\\' | ':') || c.is_control();
    !name.is_empty() && name != "." && name != ".." && !name.contains(forbidden)
}

fn check_name(name: &str) -> Result<(), OnnxError> {
    if is_bare_name(name) {
        return Ok(());
    }
    Err(plan_error(name, "the name must be a bare file name, without a folder"))
}

#[derive(Default)]
struct Placement {
    files: Vec<DataFile>,
    by_key: HashMap<String, Location>,
}

impl Placement {
    fn add_raw(&mut self, raw: RawFile) -> Result<(), OnnxError> {
        check_name(&raw.name)?;
        let fail = |problem: String| Err(plan_error(&raw.name, problem));
        if self.files.iter().any(|file| file.name == raw.name) {
            return fail("two raw files have this name".into());
        }
        let Some(length) = byte_count(raw.dtype, &raw.shape) else {
            return fail(format!("shape {:?} is too large", raw.shape));
        };
        if let Constant::Tensor(tensor) = &raw.data
            && tensor.bytes().len() as u64 != length
        {
            let actual = tensor.bytes().len();
            return fail(format!("declared {length} bytes, the data has {actual}"));
        }
        let file = self.files.len();
        let whole = key(&raw.data).map(|key| (key, 0));
        for (key, offset) in whole.into_iter().chain(raw.ranges) {
            if offset > length {
                return fail(format!("{key} starts at {offset}, the file has {length} bytes"));
            }
            // How far a range reaches is known when a constant with its key comes along.
            let location = Location { file, offset, length: length - offset };
            if self.by_key.insert(key.clone(), location).is_some() {
                return fail(format!("{key} is placed twice"));
            }
        }
        self.files.push(DataFile {
            name: raw.name.clone(),
            length,
            parts: vec![Part {
                name: raw.name,
                dtype: raw.dtype,
                offset: 0,
                length,
                data: raw.data,
            }],
            raw: true,
        });
        Ok(())
    }

    fn add_model(
        &mut self,
        model: &ModelFile<'_>,
    ) -> Result<HashMap<ValueId, Location>, OnnxError> {
        check_name(&model.data_file)?;
        let mut locations = HashMap::new();
        for (id, constant) in model.graph.constants() {
            let value = model.graph.value(id);
            let fail = |problem: String| {
                Fault::new(format!("constant {}", value.name), problem).in_file(&model.name)
            };
            let length = byte_count(value.dtype, &value.shape)
                .ok_or_else(|| fail(format!("shape {:?} is too large", value.shape)))?;
            let key = key(constant);
            if let Some(known) = key.as_ref().and_then(|key| self.by_key.get(key)) {
                let key = key.as_deref().unwrap_or_default();
                let raw = self.files.get(known.file).is_some_and(|file| file.raw);
                if (raw && length > known.length) || (!raw && length != known.length) {
                    let known = known.length;
                    let problem =
                        format!("has {length} bytes, but the data with its key {key} has {known}");
                    return Err(fail(problem));
                }
                locations.insert(id, Location { length, ..*known });
                continue;
            }
            if length <= INLINE_LIMIT {
                continue;
            }
            let part = Part {
                name: value.name.clone(),
                dtype: value.dtype,
                offset: 0,
                length,
                data: constant.clone(),
            };
            let location = self.append(&model.data_file, part)?;
            if let Some(key) = key {
                self.by_key.insert(key, location);
            }
            locations.insert(id, location);
        }
        Ok(locations)
    }

    /// Puts `part` at the next aligned offset of the file of that name.
    fn append(&mut self, name: &str, mut part: Part) -> Result<Location, OnnxError> {
        let found = self.files.iter().position(|file| file.name == name);
        let index = found.unwrap_or(self.files.len());
        if found.is_none() {
            let file = DataFile { name: name.into(), length: 0, parts: Vec::new(), raw: false };
            self.files.push(file);
        }
        let file = &mut self.files[index];
        if file.raw {
            return Err(plan_error(name, "a raw file holds one constant; name another data file"));
        }
        let too_large = || plan_error(name, "the file would be too large");
        let offset = file.length.checked_next_multiple_of(DATA_ALIGNMENT).ok_or_else(too_large)?;
        part.offset = offset;
        file.length = offset.checked_add(part.length).ok_or_else(too_large)?;
        let location = Location { file: index, offset, length: part.length };
        file.parts.push(part);
        Ok(location)
    }
}

fn key(constant: &Constant) -> Option<String> {
    match constant {
        Constant::Tensor(_) => None,
        Constant::Source(source) => source.key(),
    }
}

fn byte_count(dtype: DType, shape: &[usize]) -> Option<u64> {
    u64::try_from(dtype.byte_count(shape)?).ok()
}
