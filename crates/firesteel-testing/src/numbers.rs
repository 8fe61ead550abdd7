/// Numbers that look random; equal seeds make equal ones, on every machine.
///
/// A generator of the xorshift64* kind: Marsaglia's shifts, a product behind them (Vigna 2016).
#[derive(Debug, Clone)]
pub struct Numbers(u64);

impl Numbers {
    /// Any seed makes a sequence of its own.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// 64 bits, of which the upper ones are the better.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// One of the numbers below `bound`.
    ///
    /// # Panics
    /// When there is none.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() >> 33) as usize % bound
    }

    /// −1 up to 1, evenly.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    /// `count` of [`unit`](Self::unit).
    pub fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }

    /// `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| (self.bits() >> 56) as u8).collect()
    }

    /// `count` ids of a vocabulary of `vocabulary` tokens.
    ///
    /// # Panics
    /// When the vocabulary is empty.
    pub fn ids(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary) as u32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_and_come_again() {
        let units = Numbers::new(7).units(4096);
        assert_eq!(units, Numbers::new(7).units(4096));
        assert_ne!(units, Numbers::new(8).units(4096));
        assert!(units.iter().all(|value| (-1.0..1.0).contains(value)));
        let mean = units.iter().sum::<f32>() / 4096.0;
        let square = units.iter().map(|value| value * value).sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05 && (square - 1.0 / 3.0).abs() < 0.02, "{mean} {square}");
        let mut seen = [false; 16];
        Numbers::new(0).ids(400, 16).iter().for_each(|id| seen[*id as usize] = true);
        assert_eq!(seen, [true; 16]);
    }
}
