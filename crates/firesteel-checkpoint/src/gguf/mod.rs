//! The GGUF format, read strictly.
//!
//! A file is magic, version, two counts, key/value metadata, descriptions of tensors, and their
//! data, aligned. Versions 2 and 3 have this layout. Nothing is copied out of the mapped file but
//! names, and nothing is allocated by a number of the file: a count only bounds a loop that ends
//! with the file. Stricter than the format: counts and names are bounded, keys and tensors appear
//! once, data may not overlap, and arrays of arrays are not read.

mod config;
mod sampling;
mod tokenizer;
mod write;

pub(crate) use config::read_config;
pub use tokenizer::GgufTokenizer;
pub use write::{EncodeRows, GgufEntry, GgufLayout, GgufRows, GgufWritten, write_gguf};

use crate::json::shorten;
use crate::mistaken::mistaken_file;
use crate::{CheckpointError, FileIdentity, MappedFile, WeightFormat};
use firesteel_tensor::{DType, SharedBytes, element_count};
use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

/// First bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Most tensors of a file.
const MAX_TENSORS: u64 = 8192;
/// Most keys of a file.
const MAX_KEYS: u64 = 4096;
/// Longest name of a key or tensor, in bytes.
const MAX_NAME_BYTES: usize = 1024;
/// Longest string in the metadata, in bytes.
const MAX_STRING_BYTES: usize = 1 << 20;
/// Largest alignment of the data.
const MAX_ALIGNMENT: usize = 1 << 20;
/// Alignment of a file that does not give one.
pub(crate) const DEFAULT_ALIGNMENT: usize = 32;
const ALIGNMENT_KEY: &str = "general.alignment";

/// A mapped and checked GGUF file. A clone is cheap except for the names.
#[derive(Debug, Clone)]
pub struct Gguf {
    path: PathBuf,
    identity: Option<FileIdentity>,
    bytes: SharedBytes,
    version: u32,
    alignment: usize,
    /// Keys and where their values are: the code of a type, then the value.
    keys: Vec<(String, usize)>,
    tensors: Vec<GgufTensor>,
}

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct GgufTensor {
    /// Name in the file.
    pub name: String,
    /// Row-major shape, that is the dimensions of the file in reverse.
    pub shape: Vec<usize>,
    /// How the elements are stored.
    pub format: WeightFormat,
    /// Offset of the first byte in the file.
    pub offset: usize,
    /// Exactly the bytes of the elements.
    pub bytes: SharedBytes,
}

/// A value of the metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each is the type of its name")]
pub enum GgufValue<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(&'a str),
    Array(GgufArray<'a>),
}

/// An array of the metadata, read from the file when it is iterated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GgufArray<'a> {
    element: Type,
    length: usize,
    bytes: &'a [u8],
}

impl<'a> GgufArray<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The elements, which all have the same type.
    pub fn iter(&self) -> impl Iterator<Item = GgufValue<'a>> + use<'a> {
        let element = self.element;
        let mut cursor = Cursor { bytes: self.bytes, at: 0 };
        (0..self.length).map_while(move |_| cursor.value(element).ok())
    }
}

impl<'a> GgufValue<'a> {
    /// A whole number that is not negative, of any integer type.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            GgufValue::U8(v) => Some(v.into()),
            GgufValue::U16(v) => Some(v.into()),
            GgufValue::U32(v) => Some(v.into()),
            GgufValue::U64(v) => Some(v),
            GgufValue::I8(v) => v.try_into().ok(),
            GgufValue::I16(v) => v.try_into().ok(),
            GgufValue::I32(v) => v.try_into().ok(),
            GgufValue::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A floating-point number. One of 32 bits stands for the shortest decimal number that rounds
    /// to it, because such values come from decimal numbers: 1e-6 is read as 1e-6.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            GgufValue::F32(v) => v.to_string().parse().ok(),
            GgufValue::F64(v) => Some(v),
            _ => None,
        }
    }

    /// A truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            GgufValue::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            GgufValue::String(v) => Some(v),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<GgufArray<'a>> {
        match *self {
            GgufValue::Array(v) => Some(v),
            _ => None,
        }
    }
}

/// The value for a message: long strings shortened, arrays by type and length.
impl fmt::Display for GgufValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GgufValue::U8(v) => v.fmt(f),
            GgufValue::I8(v) => v.fmt(f),
            GgufValue::U16(v) => v.fmt(f),
            GgufValue::I16(v) => v.fmt(f),
            GgufValue::U32(v) => v.fmt(f),
            GgufValue::I32(v) => v.fmt(f),
            GgufValue::U64(v) => v.fmt(f),
            GgufValue::I64(v) => v.fmt(f),
            GgufValue::F32(v) => v.fmt(f),
            GgufValue::F64(v) => v.fmt(f),
            GgufValue::Bool(v) => v.fmt(f),
            GgufValue::String(v) => write!(f, "{:?}", shorten(v)),
            GgufValue::Array(v) => write!(f, "an array of {} {}", v.length, v.element.name()),
        }
    }
}

/// Types of metadata; the code in a file is the index in `ALL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Type {
    const ALL: [Type; 13] = [
        Type::U8,
        Type::I8,
        Type::U16,
        Type::I16,
        Type::U32,
        Type::I32,
        Type::F32,
        Type::Bool,
        Type::String,
        Type::Array,
        Type::U64,
        Type::I64,
        Type::F64,
    ];

    fn from_code(code: u32) -> Result<Self, String> {
        let found = usize::try_from(code).ok().and_then(|code| Self::ALL.get(code).copied());
        found.ok_or_else(|| format!("type {code} is not known; accepted: 0 to 12"))
    }

    const fn name(self) -> &'static str {
        match self {
            Type::U8 => "uint8",
            Type::I8 => "int8",
            Type::U16 => "uint16",
            Type::I16 => "int16",
            Type::U32 => "uint32",
            Type::I32 => "int32",
            Type::F32 => "float32",
            Type::Bool => "bool",
            Type::String => "strings",
            Type::Array => "arrays",
            Type::U64 => "uint64",
            Type::I64 => "int64",
            Type::F64 => "float64",
        }
    }
}

/// Codes of the element types that are read.
pub(crate) const FORMATS: &[(u32, WeightFormat)] = &[
    (0, WeightFormat::Float(DType::F32)),
    (1, WeightFormat::Float(DType::F16)),
    (30, WeightFormat::Float(DType::BF16)),
    (2, WeightFormat::Q4_0),
    (3, WeightFormat::Q4_1),
    (8, WeightFormat::Q8_0),
    (12, WeightFormat::Q4K),
    (13, WeightFormat::Q5K),
    (14, WeightFormat::Q6K),
];

/// Names of the element types that are not read, by code.
const OTHER_FORMATS: &[(u32, &str)] = &[
    (6, "Q5_0"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

/// Why a file is refused.
#[derive(Debug)]
enum Refusal {
    /// It breaks the format.
    Rule(String),
    /// A tensor has a type that is not read.
    Format { tensor: String, format: String },
}

impl From<String> for Refusal {
    fn from(rule: String) -> Self {
        Refusal::Rule(rule)
    }
}

impl Gguf {
    /// Whether `path` is a file that begins as a GGUF file does.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn is_gguf(path: &Path) -> std::io::Result<bool> {
        if !fs_err::metadata(path)?.is_file() {
            return Ok(false);
        }
        let mut start = Vec::new();
        fs_err::File::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut start)?;
        Ok(start == MAGIC)
    }

    /// Maps and checks a file.
    ///
    /// # Errors
    /// When it cannot be mapped, breaks the format, or has a tensor of a type that is not read.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = MappedFile::open(path)?;
        let gguf = Self::parse(path, file.bytes()).map_err(|refusal| match refusal {
            Refusal::Rule(reason) => CheckpointError::Gguf { file: path.into(), reason },
            Refusal::Format { tensor, format } => CheckpointError::DType {
                file: path.into(),
                tensor,
                dtype: format,
                hint: ", Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K; get or make a file in one of these",
            },
        })?;
        Ok(Self { identity: Some(file.identity()), ..gguf })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which file it was when it was opened; `None` for one that was read from memory.
    pub fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    /// All of its bytes.
    pub fn bytes(&self) -> SharedBytes {
        self.bytes.clone()
    }

    /// Version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Every tensor starts at a multiple of this many bytes after the first.
    pub fn alignment(&self) -> usize {
        self.alignment
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<GgufValue<'_>> {
        let (_, at) = self.keys.iter().find(|(name, _)| name == key)?;
        self.value_at(*at)
    }

    /// The metadata in the order of the file.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, GgufValue<'_>)> {
        self.keys.iter().filter_map(|(key, at)| Some((&**key, self.value_at(*at)?)))
    }

    /// The metadata in the order of the file, each value as it is stored: the code of its type first.
    pub(super) fn stored_metadata(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.keys.iter().filter_map(|(key, at)| {
            let mut cursor = Cursor { bytes: &self.bytes, at: *at };
            cursor.typed_value().ok()?;
            Some((&**key, self.bytes.get(*at..cursor.at)?))
        })
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    fn value_at(&self, at: usize) -> Option<GgufValue<'_>> {
        Cursor { bytes: &self.bytes, at }.typed_value().ok()
    }

    fn parse(path: &Path, bytes: SharedBytes) -> Result<Self, Refusal> {
        if let Some(mistake) = mistaken_file(&bytes) {
            return Err(Refusal::Rule(mistake.into()));
        }
        let mut cursor = Cursor { bytes: &bytes, at: 0 };
        if cursor.take(4, "the magic")? != MAGIC {
            return Err(Refusal::Rule("it does not begin with GGUF".into()));
        }
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            0x0200_0000 | 0x0300_0000 => {
                let rule = "it is big-endian; accepted: little-endian files";
                return Err(Refusal::Rule(rule.into()));
            }
            _ => {
                let rule = format!("its version is {version}; accepted: 2 and 3");
                return Err(Refusal::Rule(rule));
            }
        }
        let count = |name: &str, count: u64, limit: u64| match count {
            count if count <= limit => Ok(count),
            _ => Err(format!("it is said to have {count} {name}; accepted: at most {limit}")),
        };
        let tensor_count = count("tensors", cursor.u64("the number of tensors")?, MAX_TENSORS)?;
        let key_count = count("keys", cursor.u64("the number of keys")?, MAX_KEYS)?;

        let mut keys = Vec::new();
        for number in 0..key_count {
            let key = cursor.name().map_err(|e| format!("key {number}: {e}"))?;
            let at = cursor.at;
            cursor.typed_value().map_err(|e| format!("key {:?}: {e}", shorten(key)))?;
            keys.push((key.to_owned(), at));
        }
        check_unique("key", keys.iter().map(|(key, _)| &**key))?;
        let mut gguf = Self {
            path: path.into(),
            identity: None,
            bytes: bytes.clone(),
            version,
            alignment: DEFAULT_ALIGNMENT,
            keys,
            tensors: Vec::new(),
        };
        if let Some(value) = gguf.get(ALIGNMENT_KEY) {
            let alignment = value.as_u64().and_then(|value| usize::try_from(value).ok());
            let valid = |size: &usize| size.is_power_of_two() && *size <= MAX_ALIGNMENT;
            gguf.alignment = alignment.filter(valid).ok_or_else(|| {
                format!(
                    "{ALIGNMENT_KEY} is {value}; accepted: a power of two up to {MAX_ALIGNMENT}"
                )
            })?;
        }

        let mut described = Vec::new();
        for number in 0..tensor_count {
            let name = cursor.name().map_err(|e| format!("tensor {number}: {e}"))?;
            described.push(cursor.tensor(name)?);
        }
        check_unique("tensor", described.iter().map(|tensor| &*tensor.name))?;
        let data = cursor.at.checked_next_multiple_of(gguf.alignment).unwrap_or(usize::MAX);
        for Described { name, shape, format, length, offset } in described {
            let fail = |reason: String| format!("tensor {:?}: {reason}", shorten(&name));
            let start = usize::try_from(offset).ok();
            if !start.is_some_and(|start| start.is_multiple_of(gguf.alignment)) {
                let rule = format!("its offset {offset} is no multiple of {}", gguf.alignment);
                return Err(fail(rule).into());
            }
            let start = start.and_then(|start| start.checked_add(data));
            let range = start.and_then(|start| Some(start..start.checked_add(length)?));
            let part = range.and_then(|range| Some((range.start, bytes.slice(range)?)));
            let Some((offset, bytes)) = part else {
                return Err(fail(format!(
                    "its {length} bytes at offset {offset} end outside the {} bytes of data",
                    bytes.len().saturating_sub(data)
                ))
                .into());
            };
            gguf.tensors.push(GgufTensor { name, shape, format, offset, bytes });
        }
        check_apart(&gguf.tensors)?;
        Ok(gguf)
    }
}

fn check_unique<'a>(what: &str, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("{what} {:?} appears twice", shorten(name)));
        }
    }
    Ok(())
}

fn check_apart(tensors: &[GgufTensor]) -> Result<(), String> {
    let mut sorted: Vec<&GgufTensor> = tensors.iter().collect();
    sorted.sort_by_key(|tensor| tensor.offset);
    for pair in sorted.windows(2) {
        if pair[0].offset + pair[0].bytes.len() > pair[1].offset {
            let (first, second) = (shorten(&pair[0].name), shorten(&pair[1].name));
            return Err(format!("tensor {second:?}: its data overlap those of {first:?}"));
        }
    }
    Ok(())
}

/// What a file says about a tensor.
struct Described {
    name: String,
    shape: Vec<usize>,
    format: WeightFormat,
    length: usize,
    offset: u64,
}

/// Reads forward and never beyond the end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, length: usize, what: &str) -> Result<&'a [u8], String> {
        let left = self.bytes.len() - self.at;
        let end = self.at.checked_add(length);
        let Some(part) = end.and_then(|end| self.bytes.get(self.at..end)) else {
            return Err(format!("{what} needs {length} bytes, but only {left} follow"));
        };
        self.at += length;
        Ok(part)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let part = self.take(N, what)?;
        <[u8; N]>::try_from(part).map_err(|e| e.to_string())
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn string(&mut self, what: &str, limit: usize) -> Result<&'a str, String> {
        let length = self.u64(what)?;
        let Some(bytes) = usize::try_from(length).ok().filter(|length| *length <= limit) else {
            return Err(format!("{what} is said to have {length} bytes; accepted: {limit}"));
        };
        let bytes = self.take(bytes, what)?;
        std::str::from_utf8(bytes).map_err(|e| format!("{what}: {e}"))
    }

    fn name(&mut self) -> Result<&'a str, String> {
        self.string("its name", MAX_NAME_BYTES)
    }

    fn typed_value(&mut self) -> Result<GgufValue<'a>, String> {
        let code = self.u32("its type")?;
        match Type::from_code(code)? {
            Type::Array => self.array_value().map(GgufValue::Array),
            kind => self.value(kind),
        }
    }

    fn array_value(&mut self) -> Result<GgufArray<'a>, String> {
        let element = Type::from_code(self.u32("the type of its elements")?)?;
        let count = self.u64("its length")?;
        let start = self.at;
        let left = self.bytes.len() - start;
        // A string has at least its length, so this also holds back hostile counts of strings.
        let least = match element {
            Type::U8 | Type::I8 | Type::Bool => 1,
            Type::U16 | Type::I16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::U64 | Type::I64 | Type::F64 | Type::String => 8,
            Type::Array => return Err("arrays of arrays are not read".into()),
        };
        let length = usize::try_from(count).ok().filter(|count| *count <= left / least);
        let Some(length) = length else {
            return Err(format!(
                "an array of {count} {} does not fit in the {left} bytes that follow",
                element.name()
            ));
        };
        for number in 0..length {
            self.value(element).map_err(|e| format!("element {number}: {e}"))?;
        }
        let bytes = self.bytes.get(start..self.at).unwrap_or_default();
        Ok(GgufArray { element, length, bytes })
    }

    fn value(&mut self, kind: Type) -> Result<GgufValue<'a>, String> {
        let what = "its value";
        Ok(match kind {
            Type::U8 => GgufValue::U8(u8::from_le_bytes(self.array(what)?)),
            Type::I8 => GgufValue::I8(i8::from_le_bytes(self.array(what)?)),
            Type::U16 => GgufValue::U16(u16::from_le_bytes(self.array(what)?)),
            Type::I16 => GgufValue::I16(i16::from_le_bytes(self.array(what)?)),
            Type::U32 => GgufValue::U32(u32::from_le_bytes(self.array(what)?)),
            Type::I32 => GgufValue::I32(i32::from_le_bytes(self.array(what)?)),
            Type::U64 => GgufValue::U64(u64::from_le_bytes(self.array(what)?)),
            Type::I64 => GgufValue::I64(i64::from_le_bytes(self.array(what)?)),
            Type::F32 => GgufValue::F32(f32::from_le_bytes(self.array(what)?)),
            Type::F64 => GgufValue::F64(f64::from_le_bytes(self.array(what)?)),
            Type::Bool => match self.array(what)? {
                [0] => GgufValue::Bool(false),
                [1] => GgufValue::Bool(true),
                [other] => return Err(format!("a bool of {other}; accepted: 0 and 1")),
            },
            Type::String => GgufValue::String(self.string(what, MAX_STRING_BYTES)?),
            Type::Array => return Err("arrays of arrays are not read".into()),
        })
    }

    fn tensor(&mut self, name: &str) -> Result<Described, Refusal> {
        let shown = shorten(name);
        let fail = |reason: String| format!("tensor {shown:?}: {reason}");
        let dims = self.u32("its number of dimensions").map_err(fail)?;
        if !(1..=4).contains(&dims) {
            return Err(fail(format!("it has {dims} dimensions; accepted: 1 to 4")).into());
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let dim = self.u64("a dimension").map_err(fail)?;
            let size = usize::try_from(dim).ok().filter(|size| *size > 0);
            shape.push(size.ok_or_else(|| fail(format!("a dimension of {dim}")))?);
        }
        let row = shape.first().copied().unwrap_or_default();
        shape.reverse();
        let code = self.u32("its type").map_err(fail)?;
        let Some((_, format)) = FORMATS.iter().find(|(known, _)| *known == code) else {
            let other = OTHER_FORMATS.iter().find(|(known, _)| *known == code);
            let format = other.map_or_else(|| code.to_string(), |(_, name)| (*name).to_owned());
            return Err(Refusal::Format { tensor: shown.into_owned(), format });
        };
        if !row.is_multiple_of(format.block_elements()) {
            let block = format.block_elements();
            let rule = format!("rows of {row} are not whole blocks of {block}, as {format} needs");
            return Err(fail(rule).into());
        }
        let length = element_count(&shape).and_then(|count| format.byte_count(count));
        let length = length
            .ok_or_else(|| fail(format!("the size of shape {shape:?} of {format} overflows")))?;
        let offset = self.u64("its offset").map_err(fail)?;
        Ok(Described { name: name.to_owned(), shape, format: *format, length, offset })
    }
}
