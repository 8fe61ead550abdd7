use crate::CheckpointError;
use crate::random::Generator;
use firesteel_tensor::{ConvertReport, DType, SharedBytes, element_count};
use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;

/// A named weight: row-major elements in one or several mapped pieces (concatenated along the
/// first axis), or generated. A clone is cheap and nothing is held in memory besides the map.
#[derive(Debug, Clone)]
pub struct Weight {
    name: Arc<str>,
    shape: Vec<usize>,
    dtype: DType,
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
}

/// Whole rows of a weight, in one place of one file.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// Name of the file in the checkpoint.
    pub(crate) file: Arc<str>,
    /// Offset of the first byte in the file.
    pub(crate) offset: usize,
    pub(crate) dtype: DType,
    pub(crate) bytes: SharedBytes,
}

impl Piece {
    fn element_count(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }
}

impl Weight {
    /// A weight of `shape` over `pieces`, each of which has whole rows; together they have
    /// exactly the elements of `shape`.
    pub(crate) fn mapped(name: String, shape: Vec<usize>, pieces: Vec<Piece>) -> Self {
        let mut dtypes = pieces.iter().map(|piece| piece.dtype);
        let first = dtypes.next().unwrap_or(DType::F32);
        let dtype = if dtypes.all(|dtype| dtype == first) { first } else { DType::F32 };
        Self { name: name.into(), shape, dtype, source: Source::Mapped(pieces) }
    }

    pub(crate) fn random(name: String, shape: Vec<usize>, dtype: DType, make: Generator) -> Self {
        let source = Source::Random { generator: Arc::new(make), start: 0 };
        Self { name: name.into(), shape, dtype, source }
    }

    /// Name in the checkpoint; that of the fused tensor where the checkpoint stores its parts.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Shape; `[rows, columns]` for a matrix, `[width]` for a norm.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Stored element type: f32, f16 or bf16. Parts that are stored in different types are one
    /// f32 weight, which holds all of their values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn element_count(&self) -> usize {
        element_count(&self.shape).unwrap_or(usize::MAX)
    }

    /// The stored bytes, of type [`Weight::dtype`], where they lie in one place of one file.
    pub fn bytes(&self) -> Option<&SharedBytes> {
        match &self.source {
            Source::Mapped(pieces) => match pieces.as_slice() {
                [piece] if piece.dtype == self.dtype => Some(&piece.bytes),
                _ => None,
            },
            Source::Random { .. } => None,
        }
    }

    /// Reads `out.len()` elements from `first_element` on as f32; the widening is exact.
    ///
    /// # Errors
    /// When the elements are not inside the weight.
    pub fn read_f32(&self, first_element: usize, out: &mut [f32]) -> Result<(), CheckpointError> {
        self.check_range(first_element, out.len())?;
        match &self.source {
            Source::Random { generator, start } => {
                generator.read_f32(start.saturating_add(first_element), self.dtype, out)
            }
            Source::Mapped(pieces) => {
                let range = first_element..first_element + out.len();
                for_each_part(pieces, range, |dtype, bytes, part| {
                    let out = out.get_mut(part).unwrap_or_default();
                    firesteel_tensor::read_f32(dtype, bytes, out)
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
                generator.convert(start, self.dtype, to, out).map(|part| report.merge(part))
            }
            Source::Mapped(pieces) => {
                let range = first_element..first_element + count;
                for_each_part(pieces, range, |from, bytes, part| {
                    let end = (part.end * size).min(out.len());
                    let out = out.get_mut(part.start * size..end).unwrap_or_default();
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
            Source::Mapped(pieces) => {
                let mut taken = Vec::new();
                let mut before = 0;
                for piece in pieces {
                    let count = piece.element_count();
                    let from = first.clamp(before, before + count) - before;
                    let to = last.clamp(before, before + count) - before;
                    before += count;
                    if from < to {
                        let size = piece.dtype.size();
                        let bytes = piece.bytes.slice(from * size..to * size)?;
                        let offset = piece.offset + from * size;
                        taken.push(Piece { bytes, offset, ..piece.clone() });
                    }
                }
                Source::Mapped(taken)
            }
        };
        let mut shape = self.shape.clone();
        *shape.first_mut()? = range.len();
        Some(Self { name: Arc::clone(&self.name), shape, dtype: self.dtype, source })
    }

    /// Identity of the contents: two weights of one checkpoint with equal keys hold equal values
    /// of equal types.
    pub fn key(&self) -> String {
        match &self.source {
            Source::Random { generator, start } => {
                format!("{}:{}:{start}+{}", generator.key(), self.dtype, self.element_count())
            }
            Source::Mapped(pieces) => {
                let mut key = String::new();
                for Piece { file, offset, dtype, bytes } in pieces {
                    let separator = if key.is_empty() { "" } else { "|" };
                    let length = bytes.len();
                    // Writing to a string cannot fail.
                    let _ = write!(key, "{separator}{file}:{dtype}:{offset}+{length}");
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

    fn convert_error(&self, source: firesteel_tensor::TensorError) -> CheckpointError {
        CheckpointError::Convert { tensor: self.name.to_string(), source }
    }
}

/// Calls `use_part` with the type and bytes of each stretch of the elements `range` that lies in
/// one piece, and where in `range` it lies.
fn for_each_part<E>(
    pieces: &[Piece],
    range: Range<usize>,
    mut use_part: impl FnMut(DType, &[u8], Range<usize>) -> Result<(), E>,
) -> Result<(), E> {
    let mut before = 0;
    for piece in pieces {
        let count = piece.element_count();
        let from = range.start.clamp(before, before + count);
        let to = range.end.clamp(before, before + count);
        if from < to {
            let size = piece.dtype.size();
            let bytes = piece.bytes.get((from - before) * size..(to - before) * size);
            let part = from - range.start..to - range.start;
            use_part(piece.dtype, bytes.unwrap_or_default(), part)?;
        }
        before += count;
    }
    Ok(())
}
