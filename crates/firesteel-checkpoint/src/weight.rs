use crate::blocks::dequantize;
use crate::random::Generator;
use crate::{CheckpointError, WeightFormat};
use firesteel_tensor::{ConvertReport, DType, SharedBytes, Tensor, TensorError, element_count};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// A named weight: row-major elements in one or several mapped pieces (concatenated along the
/// first axis), or generated. A clone is cheap and nothing is held in memory besides the map.
#[derive(Debug, Clone)]
pub struct Weight {
    name: Arc<str>,
    shape: Vec<usize>,
    format: WeightFormat,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    Mapped(Vec<Piece>),
    Random {
        generator: Arc<Generator>,
        /// Index of the first element in the whole tensor.
        start: usize,
    },
    Scaled {
        weight: Arc<Weight>,
        /// One factor for each index in `axis`.
        factors: Arc<[f32]>,
        axis: Axis,
    },
}

/// What of a matrix has a factor of its own.
#[derive(Debug, Clone, Copy)]
enum Axis {
    Rows,
    Columns,
}

/// Whole rows of a weight, in one place of one file.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// Name of the file in the checkpoint.
    pub(crate) file: Arc<str>,
    /// Offset of the first byte in the file.
    pub(crate) offset: usize,
    pub(crate) format: WeightFormat,
    pub(crate) bytes: SharedBytes,
}

impl Piece {
    fn element_count(&self) -> usize {
        self.bytes.len() / self.format.block_bytes() * self.format.block_elements()
    }

    /// The bytes of a range of elements that begins and ends with a block.
    fn byte_range(&self, elements: Range<usize>) -> Range<usize> {
        let (count, size) = (self.format.block_elements(), self.format.block_bytes());
        elements.start / count * size..elements.end / count * size
    }
}

/// Elements of a quantized weight that are converted at once.
const CONVERT_BLOCK: usize = 1024;

impl Weight {
    /// A weight of `shape` over `pieces`, each of which has whole rows; together they have
    /// exactly the elements of `shape`.
    pub(crate) fn mapped(name: String, shape: Vec<usize>, pieces: Vec<Piece>) -> Self {
        let mut formats = pieces.iter().map(|piece| piece.format);
        let all_values = WeightFormat::Float(DType::F32);
        let first = formats.next().unwrap_or(all_values);
        let format = if formats.all(|format| format == first) { first } else { all_values };
        Self { name: name.into(), shape, format, source: Source::Mapped(pieces) }
    }

    pub(crate) fn random(name: String, shape: Vec<usize>, dtype: DType, make: Generator) -> Self {
        let source = Source::Random { generator: Arc::new(make), start: 0 };
        Self { name: name.into(), shape, format: WeightFormat::Float(dtype), source }
    }

    /// A weight of `values` in memory.
    ///
    /// # Errors
    /// When `shape` has another number of elements.
    pub fn from_f32(
        name: &str,
        shape: Vec<usize>,
        values: Vec<f32>,
    ) -> Result<Self, CheckpointError> {
        let source = |source| CheckpointError::Convert { tensor: name.to_owned(), source };
        let tensor = Tensor::from_f32(shape, values).map_err(source)?;
        let piece = Piece {
            file: format!("memory of {name}").into(),
            offset: 0,
            format: WeightFormat::Float(DType::F32),
            bytes: tensor.shared_bytes().clone(),
        };
        Ok(Self::mapped(name.to_owned(), tensor.shape().to_vec(), vec![piece]))
    }

    /// This weight under the name `name`, each column times its factor, as f32 elements that are
    /// made when they are read; `None` when there is not one factor a column.
    pub fn with_scaled_columns(&self, name: &str, factors: &[f32]) -> Option<Self> {
        (self.shape.last() == Some(&factors.len()) && !factors.is_empty())
            .then(|| self.scaled(name, factors, Axis::Columns))
    }

    /// As [`with_scaled_columns`](Self::with_scaled_columns), each row times its factor.
    pub fn with_scaled_rows(&self, name: &str, factors: &[f32]) -> Option<Self> {
        (self.shape.first() == Some(&factors.len()) && self.element_count() > 0)
            .then(|| self.scaled(name, factors, Axis::Rows))
    }

    fn scaled(&self, name: &str, factors: &[f32], axis: Axis) -> Self {
        let (weight, factors) = (Arc::new(self.clone()), factors.into());
        Self {
            name: name.into(),
            shape: self.shape.clone(),
            format: WeightFormat::Float(DType::F32),
            source: Source::Scaled { weight, factors, axis },
        }
    }

    /// Name in the checkpoint; that of the fused tensor where the checkpoint stores its parts.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape; `[rows, columns]` for a matrix, `[width]` for a norm.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How the elements are stored. Parts that are stored in different ways are one f32 weight,
    /// which holds all of their values.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Type of the elements: f32, f16 or bf16 as stored. A quantized weight has f32 elements, the
    /// values of its blocks.
    pub fn dtype(&self) -> DType {
        match self.format {
            WeightFormat::Float(dtype) => dtype,
            _ => DType::F32,
        }
    }

    /// Number of elements.
    pub fn element_count(&self) -> usize {
        element_count(&self.shape).unwrap_or(usize::MAX)
    }

    /// The stored bytes, of type [`Weight::dtype`], where they lie in one place of one file;
    /// `None` for a quantized weight.
    pub fn bytes(&self) -> Option<&SharedBytes> {
        self.stored().filter(|_| !self.format.is_quantized())
    }

    /// The blocks of a quantized weight, of format [`Weight::format`], row by row, where they lie
    /// in one place of one file; `None` for a weight of numbers.
    pub fn blocks(&self) -> Option<&SharedBytes> {
        self.stored().filter(|_| self.format.is_quantized())
    }

    /// Bytes that the elements take as they are stored.
    pub fn stored_bytes(&self) -> usize {
        match &self.source {
            Source::Mapped(pieces) => pieces.iter().map(|piece| piece.bytes.len()).sum(),
            Source::Random { .. } => self.dtype().byte_count(&self.shape).unwrap_or(usize::MAX),
            Source::Scaled { weight, .. } => weight.stored_bytes(),
        }
    }

    /// The stored bytes part by part, each with its format; `None` for a weight whose elements are
    /// made when they are read.
    pub fn stored_parts(&self) -> Option<impl Iterator<Item = (WeightFormat, &SharedBytes)>> {
        match &self.source {
            Source::Mapped(pieces) => Some(pieces.iter().map(|piece| (piece.format, &piece.bytes))),
            Source::Random { .. } | Source::Scaled { .. } => None,
        }
    }

    fn stored(&self) -> Option<&SharedBytes> {
        match &self.source {
            Source::Mapped(pieces) => match pieces.as_slice() {
                [piece] if piece.format == self.format => Some(&piece.bytes),
                _ => None,
            },
            Source::Random { .. } | Source::Scaled { .. } => None,
        }
    }

    /// Reads `out.len()` elements from `first_element` on as f32: exactly the stored numbers, or
    /// the values of the blocks that hold the elements.
    ///
    /// # Errors
    /// When the elements are not inside the weight.
    pub fn read_f32(&self, first_element: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        self.check_range(first_element, out.len())?;
        match &self.source {
            Source::Random { generator, start } => {
                generator.read_f32(start.saturating_add(first_element), self.dtype(), out)
            }
            Source::Scaled { weight, factors, axis } => {
                weight.read_f32(first_element, out)?;
                match axis {
                    Axis::Columns => {
                        let from = first_element % factors.len();
                        let factors = factors.iter().cycle().skip(from);
                        out.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
                    }
                    Axis::Rows => {
                        let columns = self.element_count() / factors.len();
                        for (index, value) in (first_element..).zip(out) {
                            *value *= factors[index / columns];
                        }
                    }
                }
                Ok(())
            }
            Source::Mapped(pieces) => {
                let range = first_element..first_element + out.len();
                for_each_part(pieces, range, |piece, elements, part| {
                    dequantize(piece.format, &piece.bytes, elements.start, &mut out[part])
                })
            }
        }
        .map_err(|source| self.convert_error(source))
    }

    /// Converts the elements from `first_element` on to `to` (f32, f16 or bf16), as many as fit
    /// in `out`, rounding to nearest even.
    ///
    /// # Errors
    /// When the elements are not inside the weight, `out` is not a whole number of elements, or
    /// `to` is another type.
    pub fn convert(
        &self,
        first_element: usize,
        to: DType,
        out: &mut [u8],
    ) -> Result<ConvertReport, CheckpointError> {
        let size = to.size();
        let count = out.len().div_ceil(size);
        self.check_range(first_element, count)?;
        let mut report = ConvertReport::default();
        match &self.source {
            Source::Random { generator, start } => {
                let start = start.saturating_add(first_element);
                generator.convert(start, self.dtype(), to, out).map(|part| report.merge(part))
            }
            Source::Scaled { .. } => {
                let mut values = [0f32; CONVERT_BLOCK];
                let parts =
                    (0..count).step_by(CONVERT_BLOCK).zip(out.chunks_mut(CONVERT_BLOCK * size));
                for (done, out) in parts {
                    let values = &mut values[..CONVERT_BLOCK.min(count - done)];
                    self.read_f32(first_element + done, values)?;
                    let bytes = bytemuck::cast_slice(values);
                    report.merge(
                        firesteel_tensor::convert(DType::F32, bytes, to, out)
                            .map_err(|source| self.convert_error(source))?,
                    );
                }
                Ok(())
            }
            Source::Mapped(pieces) => {
                let range = first_element..first_element + count;
                for_each_part(pieces, range, |piece, elements, part| {
                    let end = (part.end * size).min(out.len());
                    let out = &mut out[part.start * size..end];
                    let WeightFormat::Float(from) = piece.format else {
                        report.merge(convert_blocks(piece, elements, to, out)?);
                        return Ok(());
                    };
                    let bytes = piece.bytes.get(piece.byte_range(elements)).unwrap_or_default();
                    report.merge(firesteel_tensor::convert(from, bytes, to, out)?);
                    Ok(())
                })
            }
        }
        .map_err(|source| self.convert_error(source))?;
        Ok(report)
    }

    /// Rows `range` of the first axis; `None` when they are not inside.
    pub fn rows(&self, range: Range<usize>) -> Option<Weight> {
        let (&rows, rest) = self.shape.split_first()?;
        if range.start > range.end || range.end > rows {
            return None;
        }
        let columns = element_count(rest)?;
        let first = range.start.checked_mul(columns)?;
        let last = range.end.checked_mul(columns)?;
        let source = match &self.source {
            Source::Random { generator, start } => Source::Random {
                generator: Arc::clone(generator),
                start: start.checked_add(first)?,
            },
            Source::Scaled { weight, factors, axis } => Source::Scaled {
                weight: Arc::new(weight.rows(range.clone())?),
                factors: match axis {
                    Axis::Rows => factors.get(range.clone())?.into(),
                    Axis::Columns => Arc::clone(factors),
                },
                axis: *axis,
            },
            Source::Mapped(pieces) => {
                let mut taken = Vec::new();
                let mut before = 0;
                for piece in pieces {
                    let count = piece.element_count();
                    let from = first.clamp(before, before + count) - before;
                    let to = last.clamp(before, before + count) - before;
                    before += count;
                    if from < to {
                        let range = piece.byte_range(from..to);
                        let offset = piece.offset + range.start;
                        let bytes = piece.bytes.slice(range)?;
                        taken.push(Piece { bytes, offset, ..piece.clone() });
                    }
                }
                Source::Mapped(taken)
            }
        };
        let mut shape = self.shape.clone();
        *shape.first_mut()? = range.len();
        Some(Self { name: Arc::clone(&self.name), shape, format: self.format, source })
    }

    /// Identity of the contents: two weights of one checkpoint with equal keys hold equal values
    /// of equal types.
    pub fn key(&self) -> String {
        match &self.source {
            Source::Random { generator, start } => {
                format!("{}:{}:{start}+{}", generator.key(), self.format, self.element_count())
            }
            Source::Scaled { weight, factors, axis } => {
                // FNV-1a over the factors.
                let hash = factors.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, factor| {
                    (hash ^ u64::from(factor.to_bits())).wrapping_mul(0x0100_0000_01b3)
                });
                format!("{}*{axis:?}:{hash:016x}", weight.key())
            }
            Source::Mapped(pieces) => {
                let mut key = String::new();
                for Piece { file, offset, format, bytes } in pieces {
                    let separator = if key.is_empty() { "" } else { "|" };
                    let length = bytes.len();
                    // Writing to a string cannot fail.
                    let _ = write!(key, "{separator}{file}:{format}:{offset}+{length}");
                }
                key
            }
        }
    }

    fn check_range(&self, first: usize, count: usize) -> Result<(), CheckpointError> {
        let available = self.element_count();
        match first.checked_add(count) {
            Some(end) if end <= available => Ok(()),
            _ => Err(CheckpointError::Range {
                tensor: self.name.to_string(),
                first,
                count,
                available,
            }),
        }
    }

    fn convert_error(&self, source: TensorError) -> CheckpointError {
        CheckpointError::Convert { tensor: self.name.to_string(), source }
    }
}

/// Converts elements of a piece of blocks by way of f32.
fn convert_blocks(
    piece: &Piece,
    elements: Range<usize>,
    to: DType,
    out: &mut [u8],
) -> Result<ConvertReport, TensorError> {
    let mut report = ConvertReport::default();
    let mut values = [0f32; CONVERT_BLOCK];
    let size = to.size();
    for (first, out) in
        elements.clone().step_by(CONVERT_BLOCK).zip(out.chunks_mut(CONVERT_BLOCK * size))
    {
        let values = &mut values[..CONVERT_BLOCK.min(elements.end - first)];
        dequantize(piece.format, &piece.bytes, first, values)?;
        report.merge(firesteel_tensor::convert(DType::F32, bytemuck::cast_slice(values), to, out)?);
    }
    Ok(report)
}

/// Calls `use_part` with each piece that holds some of the elements `range`, which of its own
/// elements they are, and where in `range` they lie.
fn for_each_part<E>(
    pieces: &[Piece],
    range: Range<usize>,
    mut use_part: impl FnMut(&Piece, Range<usize>, Range<usize>) -> Result<(), E>,
) -> Result<(), E> {
    let mut before = 0;
    for piece in pieces {
        let count = piece.element_count();
        let from = range.start.clamp(before, before + count);
        let to = range.end.clamp(before, before + count);
        if from < to {
            use_part(piece, from - before..to - before, from - range.start..to - range.start)?;
        }
        before += count;
    }
    Ok(())
}
