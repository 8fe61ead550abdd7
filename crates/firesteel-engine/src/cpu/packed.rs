//! Weights that the kernels take in another layout than the file has them: packed once into a file
//! that is mapped from then on.
//!
//! # The file
//!
//! `KEY-LAYOUT.packed`, where KEY is the hash (xxh3, 128 bits) of the weights as the model's files
//! store them, and LAYOUT the version of the packed layout. A header, padded to a page, is followed
//! by the tensors, each at the start of a page. The header is magic, version, layout, key, number
//! of tensors, and for each name, format, rows, columns, offset and length; all numbers are
//! little-endian.
//!
//! A header follows from the model, so a file is accepted if it begins with exactly the bytes of
//! the header that the model makes and has exactly the length that this says; nothing in it is
//! interpreted. Then the first and the last strip of every tensor are packed again and compared.
//! What does not fit is packed anew. The bytes between are trusted, as those of the model's own
//! file are.
//!
//! # The index
//!
//! `DEVICE-INODE.index` remembers the key of a GGUF file, so that it need not be read to find its
//! packed weights. It counts as long as size and times of the file are what they were. What a folder
//! of several files needs packed is little, and is hashed each time.

use crate::EngineError;
use firesteel_checkpoint::{
    Checkpoint, FileIdentity, MappedFile, StagedFile, Weight, WeightFormat, cache_root,
    write_all_at,
};
use firesteel_kernels::{Format, PACKED_LAYOUT, PACKED_ROWS, pack};
use firesteel_tensor::{Buffer, DType, SharedBytes};
use fs_err as fs;
use rayon::prelude::*;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::xxh3_128;

/// Where weights in the kernels' layout are kept from one process to the next.
///
/// Files that no process has used for 30 days are removed when another is added. Any of them may be
/// removed at any time; it is made again. Where a file does not fit, or none can be written, the
/// weights are packed into memory, and [`CpuModel::warnings`](super::CpuModel::warnings) says so.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PackedCache {
    /// The folder `packed` in [`cache_root`], for models with 16 MiB and more of such weights;
    /// smaller ones are packed into memory.
    #[default]
    Default,
    /// Nowhere: they are packed into memory each time.
    Disabled,
    /// This folder, which is made if it does not exist.
    Folder(PathBuf),
}

/// Where the weights of a [`CpuModel`](super::CpuModel) in the kernels' layout are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackedWeights {
    /// All weights are used as they lie in the model's files.
    None,
    /// In memory.
    Memory,
    /// In a file that this process wrote.
    Written,
    /// In a file that was there.
    Found,
}

impl PackedWeights {
    /// The lower-case name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Memory => "memory",
            Self::Written => "written",
            Self::Found => "found",
        }
    }
}

const MAGIC: &[u8; 8] = b"FSTLPACK";
/// Version of the file's form, apart from that of the layout of its tensors.
const VERSION: u32 = 1;
/// Tensors start at multiples of it.
const PAGE: usize = 4096;
/// Bytes that are packed at once, at most, unless a strip is longer.
const PIECE: usize = 1 << 20;
/// Least bytes that are worth a file in the common folder.
const LEAST: usize = 16 << 20;
/// How long a file is kept that nobody uses.
const KEPT: Duration = Duration::from_hours(24 * 30);
/// How often the use of a file is noted.
const NOTED: Duration = Duration::from_hours(24);
/// Times of files may be this coarse: one that changed later than this ago may change again and
/// bear the same times.
const COARSE: Duration = Duration::from_secs(2);
const PACKED: &str = "packed";
const INDEX: &str = "index";
/// Longer than any index entry.
const INDEX_LIMIT: u64 = 1024;

/// A weight that the kernels do not take as it is stored.
pub(super) struct Unpacked<'a> {
    weight: &'a Weight,
    format: Format,
    rows: usize,
    columns: usize,
    length: usize,
}

impl<'a> Unpacked<'a> {
    /// `weight`, whose shape is `[rows, columns]`, for the kernels.
    pub(super) fn new(
        weight: &'a Weight,
        rows: usize,
        columns: usize,
    ) -> Result<Self, EngineError> {
        let format = kernel_format(weight);
        let length = format.packed_bytes(rows, columns)?;
        Ok(Self { weight, format, rows, columns, length })
    }

    /// Hash of the bytes in the model's files; `None` when there are none.
    fn hash(&self) -> Option<u128> {
        let mut all = Vec::new();
        for (format, bytes) in self.weight.stored_parts()? {
            all.extend_from_slice(&xxh3_128(bytes).to_le_bytes());
            all.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            all.extend_from_slice(format.name().as_bytes());
        }
        Some(xxh3_128(&all))
    }

    /// Whether it takes more bytes than in its file, because the kernels lack its format.
    fn is_enlarged(&self) -> bool {
        self.weight.format().is_quantized() && !self.format.is_quantized()
    }

    /// Packs whole strips of rows.
    fn pack(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), EngineError> {
        let Self { format, columns, .. } = *self;
        match self.weight.blocks().filter(|_| format.is_quantized()) {
            Some(blocks) => {
                let row = format.row_major_bytes(1, columns)?;
                let blocks = blocks.get(rows.start * row..rows.end * row).unwrap_or_default();
                pack(format, blocks, rows.len(), columns, out)?;
            }
            // Separate projections, generated weights, odd offsets and blocks without a kernel.
            None => {
                let dtype = match format {
                    Format::F16 => DType::F16,
                    Format::BF16 => DType::BF16,
                    _ => DType::F32,
                };
                let report = self.weight.convert(rows.start * columns, dtype, out)?;
                if report.overflowed > 0 {
                    return Err(EngineError::BlockRange {
                        tensor: self.weight.name().into(),
                        format: self.weight.format(),
                        count: report.overflowed,
                    });
                }
            }
        }
        Ok(())
    }

    fn in_memory(&self) -> Result<SharedBytes, EngineError> {
        let mut packed = Buffer::zeroed(self.length);
        self.pack(0..self.rows, packed.bytes_mut())?;
        Ok(SharedBytes::new(Arc::new(packed)))
    }

    /// Ranges of rows that are packed at once.
    fn pieces(&self) -> Result<Vec<Range<usize>>, EngineError> {
        let strip = self.format.packed_bytes(PACKED_ROWS, self.columns)?;
        let step = (PIECE / strip.max(1)).max(1) * PACKED_ROWS;
        let first = (0..self.rows).step_by(step);
        Ok(first.map(|first| first..self.rows.min(first + step)).collect())
    }

    /// Where the packed bytes of rows are, from the start of the tensor.
    fn place(&self, rows: &Range<usize>) -> Result<Range<usize>, EngineError> {
        let start = self.format.packed_bytes(rows.start, self.columns)?;
        Ok(start..start + self.format.packed_bytes(rows.len(), self.columns)?)
    }

    /// Whether `bytes` begin and end as the packed weight does.
    fn looks_like(&self, bytes: &[u8]) -> Result<bool, EngineError> {
        let last = self.rows.saturating_sub(1) / PACKED_ROWS * PACKED_ROWS;
        for rows in [0..self.rows.min(PACKED_ROWS), last..self.rows] {
            let place = self.place(&rows)?;
            let mut packed = Buffer::zeroed(place.len());
            self.pack(rows, packed.bytes_mut())?;
            if bytes.get(place) != Some(packed.bytes()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The format that a weight is packed in.
///
/// Blocks without a kernel (Q4_1, Q5_K) become f16. Where their values reach to both sides of 0, no
/// value is larger than 31 steps of its block. F16, which keeps 11 bits, is then wrong by 1/66 of a
/// step at most where the blocks themselves are wrong by up to half a step, so the error of a product
/// stays what their author chose. Bf16 and Q8 would be wrong by up to 1/8 of a step.
fn kernel_format(weight: &Weight) -> Format {
    let in_one_place = weight.blocks().is_some();
    match weight.format() {
        WeightFormat::Q8_0 if in_one_place => Format::Q8,
        WeightFormat::Q4_0 if in_one_place => Format::Q4,
        WeightFormat::Q4K if in_one_place => Format::Q4K,
        WeightFormat::Q6K if in_one_place => Format::Q6K,
        format if format.is_quantized() => Format::F16,
        _ => float_format(weight),
    }
}

/// The elements of a weight of `[rows, columns]` in memory, as [`float_format`] says.
pub(super) fn widened(
    weight: &Weight,
    rows: usize,
    columns: usize,
) -> Result<SharedBytes, EngineError> {
    let mut elements = Buffer::zeroed(float_format(weight).row_major_bytes(rows, columns)?);
    weight.convert(0, weight.dtype(), elements.bytes_mut())?;
    Ok(SharedBytes::new(Arc::new(elements)))
}

/// The kernels' name of the type of a weight's elements.
pub(super) fn float_format(weight: &Weight) -> Format {
    match weight.dtype() {
        DType::F16 => Format::F16,
        DType::BF16 => Format::BF16,
        _ => Format::F32,
    }
}

/// The packed weights of a model.
pub(super) struct Packed {
    by_key: HashMap<String, SharedBytes>,
    pub(super) source: PackedWeights,
    pub(super) warnings: Vec<String>,
}

impl Packed {
    /// Finds, writes or makes the packed bytes of `weights`, of which none are there twice.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        weights: &[Unpacked<'_>],
        cache: &PackedCache,
    ) -> Result<Self, EngineError> {
        let total: usize = weights.iter().map(|weight| weight.length).sum();
        let mut packed = Self {
            by_key: HashMap::new(),
            source: PackedWeights::Memory,
            warnings: enlarged(weights).into_iter().collect(),
        };
        if weights.is_empty() {
            packed.source = PackedWeights::None;
            return Ok(packed);
        }
        let folder = match cache {
            PackedCache::Disabled => None,
            PackedCache::Default if total < LEAST => None,
            PackedCache::Default => Some(cache_root().map(|root| root.join(PACKED))),
            PackedCache::Folder(folder) => Some(Ok(folder.clone())),
        };
        let identity = checkpoint.gguf().and_then(|gguf| gguf.identity());
        let stored = weights.iter().all(|weight| weight.weight.stored_parts().is_some());
        if let (Some(folder), true) = (folder, stored) {
            let mapped = folder.map_err(EngineError::from).and_then(|folder| {
                let store = Store { folder: &folder, weights, identity };
                store.mapped()
            });
            match mapped {
                Ok((bytes, source)) => {
                    packed.by_key = bytes;
                    packed.source = source;
                    return Ok(packed);
                }
                Err(error) => {
                    packed.warnings.push(format!(
                        "{} MiB of weights are packed into memory, because no file can keep them: \
                         {error}; set FIRESTEEL_CACHE to a folder with room that can be written",
                        total >> 20
                    ));
                }
            }
        }
        let made: Vec<_> = weights
            .par_iter()
            .map(|weight| Ok((weight.weight.key(), weight.in_memory()?)))
            .collect::<Result<_, EngineError>>()?;
        packed.by_key = made.into_iter().collect();
        Ok(packed)
    }

    /// The packed bytes of a weight, and their format.
    pub(super) fn get(&self, weight: &Unpacked<'_>) -> Result<(Format, SharedBytes), EngineError> {
        let bytes = match self.by_key.get(&weight.weight.key()) {
            Some(bytes) => bytes.clone(),
            None => weight.in_memory()?,
        };
        Ok((weight.format, bytes))
    }
}

/// What weights cost that the kernels lack the format of; `None` if there are none.
fn enlarged(weights: &[Unpacked<'_>]) -> Option<String> {
    let enlarged: Vec<_> = weights.iter().filter(|weight| weight.is_enlarged()).collect();
    let formats: BTreeSet<_> =
        enlarged.iter().map(|weight| weight.weight.format().name()).collect();
    let first = enlarged.first()?.weight.name();
    let mebibytes = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    Some(format!(
        "{} matrices of {} ({first} is the first) are computed with in f16, because there are no \
         kernels for it: each token reads {:.1} MiB of them, not {:.1} MiB; there are kernels for \
         q8_0, q6_k, q4_k and q4_0",
        enlarged.len(),
        formats.into_iter().collect::<Vec<_>>().join(" and "),
        mebibytes(enlarged.iter().map(|weight| weight.length).sum()),
        mebibytes(enlarged.iter().map(|weight| weight.weight.stored_bytes()).sum()),
    ))
}

/// The packed weights of one model in one folder.
struct Store<'a> {
    folder: &'a Path,
    /// All of them lie in files.
    weights: &'a [Unpacked<'a>],
    /// Of the file that they are all in.
    identity: Option<FileIdentity>,
}

impl Store<'_> {
    /// The packed bytes by the keys of the weights, from a file that is there or is written.
    fn mapped(&self) -> Result<(HashMap<String, SharedBytes>, PackedWeights), EngineError> {
        let remembered = self.read_index();
        if let Some(key) = remembered
            && let Some(bytes) = self.open(key)?
        {
            return Ok((bytes, PackedWeights::Found));
        }
        let key = self.key();
        if remembered != Some(key) {
            self.write_index(key);
            if let Some(bytes) = self.open(key)? {
                return Ok((bytes, PackedWeights::Found));
            }
        }
        self.remove_old();
        self.write(key)?;
        let bytes = self.open(key)?.ok_or_else(|| {
            std::io::Error::other(format!("{} is not what was written", self.path(key).display()))
        })?;
        Ok((bytes, PackedWeights::Written))
    }

    fn path(&self, key: u128) -> PathBuf {
        self.folder.join(format!("{key:032x}-{PACKED_LAYOUT}.{PACKED}"))
    }

    /// Hash of the weights as they are stored.
    fn key(&self) -> u128 {
        let hashes: Vec<u128> =
            self.weights.par_iter().map(|weight| weight.hash().unwrap_or_default()).collect();
        let mut all = Vec::new();
        for (weight, hash) in self.weights.iter().zip(hashes) {
            all.extend_from_slice(&hash.to_le_bytes());
            describe(weight, &mut all);
        }
        xxh3_128(&all)
    }

    /// The header of the file, where its tensors are, and its length.
    fn plan(&self, key: u128) -> (Vec<u8>, Vec<usize>, usize) {
        let mut header = MAGIC.to_vec();
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&PACKED_LAYOUT.to_le_bytes());
        header.extend_from_slice(&key.to_le_bytes());
        header.extend_from_slice(&(self.weights.len() as u64).to_le_bytes());
        let mut table = Vec::new();
        for weight in self.weights {
            describe(weight, &mut table);
        }
        let places = 16 * self.weights.len();
        let mut end = (header.len() + table.len() + places).next_multiple_of(PAGE);
        header.extend_from_slice(&table);
        let mut offsets = Vec::with_capacity(self.weights.len());
        for weight in self.weights {
            offsets.push(end);
            header.extend_from_slice(&(end as u64).to_le_bytes());
            header.extend_from_slice(&(weight.length as u64).to_le_bytes());
            end += weight.length.next_multiple_of(PAGE);
        }
        (header, offsets, end)
    }

    /// Maps the file if there is one that fits.
    fn open(&self, key: u128) -> Result<Option<HashMap<String, SharedBytes>>, EngineError> {
        let path = self.path(key);
        // Whatever is wrong with the file, another is written in its place.
        let Ok(bytes) = MappedFile::open(&path).map(|file| file.bytes()) else { return Ok(None) };
        let (header, offsets, length) = self.plan(key);
        if bytes.len() != length || !bytes.starts_with(&header) {
            return Ok(None);
        }
        let mut by_key = HashMap::with_capacity(self.weights.len());
        for (weight, offset) in self.weights.iter().zip(offsets) {
            let Some(tensor) = bytes.slice(offset..offset + weight.length) else {
                return Ok(None);
            };
            if !weight.looks_like(&tensor)? {
                return Ok(None);
            }
            by_key.insert(weight.weight.key(), tensor);
        }
        note_use(&path);
        Ok(Some(by_key))
    }

    /// Packs everything into the file, a piece at a time.
    fn write(&self, key: u128) -> Result<(), EngineError> {
        let staged = StagedFile::create(&self.path(key), Some(|_| Ok(true)))?;
        let (header, offsets, length) = self.plan(key);
        staged.require_space(length as u64)?;
        let file = staged.file();
        file.set_len(length as u64)?;
        write_all_at(file.file(), &header, 0)?;
        let mut pieces = Vec::new();
        for (weight, offset) in self.weights.iter().zip(offsets) {
            pieces.extend(weight.pieces()?.into_iter().map(|rows| (weight, offset, rows)));
        }
        pieces.par_iter().try_for_each_init(
            || Buffer::zeroed(0),
            |buffer, (weight, offset, rows)| {
                let place = weight.place(rows)?;
                if buffer.len() < place.len() {
                    *buffer = Buffer::zeroed(place.len());
                }
                let out = &mut buffer.bytes_mut()[..place.len()];
                weight.pack(rows.clone(), out)?;
                write_all_at(file.file(), out, (offset + place.start) as u64)?;
                Ok::<(), EngineError>(())
            },
        )?;
        Ok(staged.commit()?)
    }

    fn index_path(&self, identity: FileIdentity) -> PathBuf {
        self.folder.join(format!("{:x}-{:x}.{INDEX}", identity.device, identity.inode))
    }

    fn read_index(&self) -> Option<u128> {
        let identity = self.identity?;
        let mut text = String::new();
        let file = fs::File::open(self.index_path(identity)).ok()?;
        file.take(INDEX_LIMIT).read_to_string(&mut text).ok()?;
        let key = text.strip_prefix(&index_text(identity))?.strip_suffix('\n')?;
        u128::from_str_radix(key, 16).ok().filter(|parsed| format!("{parsed:032x}") == key)
    }

    /// Remembers the key. An entry that cannot be written only costs time.
    fn write_index(&self, key: u128) {
        let Some(identity) = self.identity else { return };
        let settled = |time: i128| {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            now.is_ok_and(|now| {
                now.as_nanos().try_into().is_ok_and(|now: i128| {
                    now - time > COARSE.as_nanos().try_into().unwrap_or(i128::MAX)
                })
            })
        };
        if !settled(identity.modified) || !settled(identity.changed) {
            return;
        }
        let write = || {
            let staged = StagedFile::create(&self.index_path(identity), Some(|_| Ok(true)))?;
            let text = format!("{}{key:032x}\n", index_text(identity));
            write_all_at(staged.file().file(), text.as_bytes(), 0)?;
            staged.commit()
        };
        let _ = write();
    }

    /// Removes files that nobody has used for long. What cannot be removed stays.
    fn remove_old(&self) {
        let Ok(entries) = fs::read_dir(self.folder) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            let ours = path.extension().and_then(OsStr::to_str);
            let old = || Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? > KEPT);
            if matches!(ours, Some(PACKED | INDEX)) && old() == Some(true) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// An index entry without the key.
fn index_text(identity: FileIdentity) -> String {
    let FileIdentity { device, inode, size, modified, changed } = identity;
    format!("firesteel packed {VERSION} {device} {inode} {size} {modified} {changed} ")
}

/// Name, format and shape, each preceded by its length where it has one.
fn describe(weight: &Unpacked<'_>, out: &mut Vec<u8>) {
    for text in [weight.weight.name(), &weight.format.to_string()] {
        out.extend_from_slice(&(text.len() as u64).to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    }
    for number in [weight.rows, weight.columns] {
        out.extend_from_slice(&(number as u64).to_le_bytes());
    }
}

/// Sets the time of a file that is used, so that it is not taken for old. If it cannot be set, the
/// file may be made once more than needed.
fn note_use(path: &Path) {
    let note = || {
        let file = fs::File::open(path)?;
        if file.metadata()?.modified()?.elapsed().is_ok_and(|age| age > NOTED) {
            file.file().set_modified(SystemTime::now())?;
        }
        Ok::<(), std::io::Error>(())
    };
    let _ = note();
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::Slot;

    #[test]
    fn a_file_that_does_not_fit_is_not_begun() {
        let model = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/golden/llamacpp/spark-tiny-q4_0.gguf"
        );
        let checkpoint = Checkpoint::open(model.as_ref()).unwrap();
        let weight = checkpoint.layers()[0].weight(Slot::MlpUp).unwrap();
        let (rows, columns) = (weight.shape()[0], weight.shape()[1]);
        let unpacked = Unpacked::new(weight, rows, columns).unwrap();
        let weights = [Unpacked { length: 1 << 60, ..unpacked }];
        let folder = tempfile::tempdir().unwrap();
        let store = Store { folder: folder.path(), weights: &weights, identity: None };
        let error = store.mapped().unwrap_err().to_string();
        assert!(error.contains("bytes are needed, but only"), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
